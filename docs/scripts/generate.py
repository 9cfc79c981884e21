"""Draw the pictures of the site, and write the tables that stand between its markers.

    python docs/scripts/generate.py            # writes; `make docs` does it first
    python docs/scripts/generate.py --check    # says what is not current, and writes nothing

A region of a page lies between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Each module here
has `pictures()`, file name -> SVG, and `regions()`, (page, name) -> Markdown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import decision
import formats
import peers
import performance
import serving
import timelines
import training

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
MODULES = (decision, formats, peers, performance, serving, timelines, training)


def with_region(page: str, name: str, content: str) -> str:
    """The page with one region replaced; it must have it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"expected one region {name!r}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", page)


def wanted() -> dict[Path, str]:
    """Every file that is made here, as it should be."""
    files: dict[Path, str] = {}
    for module in MODULES:
        for name, svg in module.pictures().items():
            files[PICTURES / name] = svg
        for (page, name), content in module.regions().items():
            path = ROOT / page
            if path.parent != ROOT / "docs":  # links of a page are relative to it
                content = content.replace("](../", "](")
            files[path] = with_region(files.get(path, path.read_text()), name, content)
    return files


def main(check: bool) -> int:
    stale = {p: t for p, t in wanted().items() if not p.exists() or p.read_text() != t}
    for path, text in stale.items():
        print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
