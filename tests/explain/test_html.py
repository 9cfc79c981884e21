"""The page: whole, self-contained, readable by machines, and without overlaps in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from openmla.explain.html import explain_html
from openmla.explain.memory_picture import smem_picture, tmem_picture
from openmla.explain.pipeline_picture import pipeline_picture
from openmla.explain.schedule import schedule
from openmla.planning import Plan, plan
from openmla.planning.models import problem_for_model
from openmla.planning.registry import family_named

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CASES = [
    ("deepseek-v3", "b200", "bf16"),
    ("deepseek-v3", "h200", "bf16"),
    ("deepseek-v3", "mi355x", "e4m3"),
    ("deepseek-v3.2", "b200", "bf16"),
    ("deepseek-v3.2", "h200", "fp8_656"),
    ("deepseek-v3.2", "b200", "fp8_block64"),
    ("a.x-k2", "h200", "bf16"),
    ("glm-5", "rtx5090", "bf16"),
    ("deepseek-v3", "cpu", "bf16"),
]
# Reports texts of one picture that touch each other or leave the picture.
PROBE = """<script>
const found = [];
for (const svg of document.querySelectorAll('svg.chart')) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([a, r], i) => {
    if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.bottom > frame.bottom + 1)
      found.push(a + ' leaves its picture');
    for (const [b, s] of boxes.slice(i + 1))
      if (r.left < s.right - 1 && s.left < r.right - 1 &&
          r.top < s.bottom - 3 && s.top < r.bottom - 3)
        found.push(a + ' touches ' + b);
  });
}
document.body.dataset.found = found.join('; ');
document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth ? 'yes' : 'no';
</script></body>"""


def page_plan(model: str, target: str, dtype: str) -> Plan:
    return plan(problem_for_model(model, tokens=4096, context=8192, dtype=dtype), target)


class Outline(HTMLParser):
    """Tags in order, and whether they close as they open."""

    VOID = frozenset({"meta", "line", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if "aria-labelledby" in values:
            self.labels.append(str(values["aria-labelledby"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_page_is_whole_and_needs_nothing_else(case: tuple[str, str, str]) -> None:
    page = explain_html(page_plan(*case))
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.labels and set(outline.labels) <= set(outline.ids)
    assert len(outline.ids) == len(set(outline.ids))
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert root.findtext(f"{SVG}title") and root.findtext(f"{SVG}desc")


def test_sections_follow_the_kernel() -> None:
    def sections(*case: str) -> list[str]:
        return re.findall(r'<h2 id="([^"]+)"', explain_html(page_plan(*case)))

    common = ["pipeline-of-one-tile", "how-the-numbers-came-about"]
    last = ["the-same-problem-on-every-target"]
    b200, mi355x = (
        sections("deepseek-v3", "b200", "bf16"),
        sections("deepseek-v3", "mi355x", "e4m3"),
    )
    assert b200 == ["shared-memory", "tensor-memory", *common, *last]
    assert mi355x == ["lds", common[0], "lds-banks", common[1], *last]
    assert sections("deepseek-v3", "cpu", "bf16") == [common[1], *last]


def test_page_tells_planned_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    running = explain_html(page_plan("deepseek-v3", "b200", "bf16"))
    assert '<span class="badge simulated">simulated</span>' in running
    for kernel in family_named("blackwell").kernels:
        monkeypatch.setitem(kernel.__dict__, "launcher", "")
    planned = explain_html(page_plan("deepseek-v3", "b200", "bf16"))
    assert "planned, its kernel is not implemented yet" in planned


@pytest.mark.parametrize("case", CASES[:-1], ids="-".join)
def test_memory_is_drawn_to_scale(case: tuple[str, str, str]) -> None:
    block = page_plan(*case).block
    assert block is not None
    smem = block.memory
    root = ElementTree.fromstring(smem_picture(smem))
    boxes = [box for box in root.iter(f"{SVG}rect") if "edge" in str(box.get("class"))]
    empty = next(box for box in root.iter(f"{SVG}rect") if box.get("class") == "empty")
    pixels = float(str(empty.get("width"))) / smem.limit
    assert len(boxes) == len(smem.regions)
    for box, region in zip(boxes, smem.regions, strict=True):
        x = float(str(box.get("x"))) - float(str(empty.get("x")))
        assert x == pytest.approx(region.offset * pixels, abs=0.2)
        assert float(str(box.get("width"))) == pytest.approx(region.size * pixels, abs=0.65)


def test_tensor_memory_names_every_range() -> None:
    block = page_plan("deepseek-v3", "b200", "bf16").block
    assert block is not None
    columns = block.tensor_memory
    picture = tmem_picture(columns, 512)
    assert "512 of 512 columns, 0 free" in picture
    assert all(f"{c.name}: {c.count} from {c.first}" in picture for c in columns)


def test_timeline_has_a_box_per_step() -> None:
    steps = schedule(page_plan("deepseek-v3", "b200", "bf16"))
    picture = pipeline_picture(steps)
    assert picture.count(" edge") == len(steps)
    assert "busy" in picture and "waiting" in picture


def browse(page: Path, profile: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    command += ["--disable-background-networking", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_in_a_browser(case: tuple[str, str, str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(explain_html(page_plan(*case)).replace("</body>", PROBE), encoding="utf-8")
    dom = browse(page, tmp_path / "profile", "--window-size=1100,2200", "--dump-dom")
    assert 'data-found=""' in dom, re.findall(r'data-found="([^"]*)"', dom)
    assert 'data-wide="no"' in dom


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_screenshot(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(explain_html(page_plan(*CASES[0])), encoding="utf-8")
    shot = tmp_path / "plan.png"
    browse(page, tmp_path / "profile", "--window-size=1100,2200", f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000
