"""The plan page and the plots of benchmarks in a browser: desktop and phone, light and dark.

All of them are frames of one page, so that a browser starts once per color scheme. A script in that
page measures the text of every frame and writes down what it finds.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from openmla.explain.bars_picture import bars_picture
from openmla.explain.html import explain_html
from openmla.planning import plan
from openmla.planning.models import problem_for_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = {"dark": 0, "light": 1}  # Chromium's numbers for them
PROBE = """
addEventListener('load', () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, inside = frame.contentWindow, wrong = [];
    const shown = page.documentElement;
    if (shown.scrollWidth > frame.clientWidth + 1) wrong.push('wider than the window');
    for (const svg of page.querySelectorAll('svg')) {
      const edge = svg.getBoundingClientRect();
      const texts = [...svg.querySelectorAll('text')];
      const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
      boxes.forEach(([a, r], i) => {
        if (r.left < edge.left - 1 || r.right > edge.right + 1) wrong.push(a + ' leaves it');
        for (const [b, s] of boxes.slice(i + 1))
          if (r.left < s.right - 1 && s.left < r.right - 1 &&
              r.top < s.bottom - 3 && s.top < r.bottom - 3) wrong.push(a + ' touches ' + b);
      });
    }
    for (const entry of inside.performance.getEntriesByType('resource'))
      if (!entry.name.startsWith('file:')) wrong.push('asks for ' + entry.name);
    const [text, paper] = ['text, h1', '.paper, body'].map(name => page.querySelector(name));
    const look = (e, name) => inside.getComputedStyle(e)[name];
    const svg = paper.tagName == 'rect';
    const ink = look(text, svg ? 'fill' : 'color');
    const under = look(paper, svg ? 'fill' : 'backgroundColor');
    found[frame.id] = {wrong, ink, under, texts: page.querySelectorAll('text').length};
  }
  document.body.dataset.found = JSON.stringify(found);
});
"""


def pages() -> dict[str, str]:
    """File name -> content."""
    dense = problem_for_model("deepseek-v3", tokens=4096)
    sparse = problem_for_model("deepseek-v3.2", tokens=4096, context=65536, dtype="fp8_656")
    shapes = [f"causal 1x{n} h{h} 128+64→128" for n in (128, 4096, 131072) for h in (16, 128)]
    rates = {
        name: {"openmla": 740.0 - 60 * i, "cuDNN": 560.5, "cuDNN + assembling K": 3.0 + i}
        for i, name in enumerate(shapes)
    }
    return {
        "plan-h200.html": explain_html(plan(dense, "h200")),
        "plan-b200.html": explain_html(plan(sparse, "b200")),
        "bars.svg": bars_picture("openmla bench dense, matmul 790 TFLOP/s", rates, "TFLOP/s"),
    }


def browse(folder: Path, scheme: str) -> tuple[dict[str, dict[str, object]], Path]:
    """What the probe found in every frame, and a picture of them all."""
    assert CHROMIUM is not None
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
    frames = [
        f'<iframe id="{name} {size}" src="{name}" style="width:{width}px;height:1400px;border:0">'
        "</iframe>"
        for name in pages()
        for size, width in WIDTHS.items()
    ]
    whole = folder / "frames.html"
    body = "\n".join(frames)
    whole.write_text(
        f"<!doctype html><meta charset=utf-8><body>{body}<script>{PROBE}</script></body>"
    )
    shot = folder / f"{scheme}.png"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1300,8600",
        f"--screenshot={shot}",
        "--dump-dom",
        whole.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-1000:]
    return json.loads(html.unescape(found[1])), shot


def light(color: object) -> float:
    """How light a color "rgb(r, g, b)" is, from 0 to 1, as WCAG has it."""
    parts = [int(x) / 255 for x in re.findall(r"\d+", str(color))[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_every_width_and_scheme_is_readable(tmp_path: Path):
    shots = {}
    for scheme in SCHEMES:
        found, shots[scheme] = browse(tmp_path, scheme)
        assert len(found) == len(pages()) * len(WIDTHS)
        assert {name: frame["wrong"] for name, frame in found.items() if frame["wrong"]} == {}
        for frame in found.values():
            ink, under = light(frame["ink"]), light(frame["under"])
            assert (ink > under) == (scheme == "dark")
            assert (max(ink, under) + 0.05) / (min(ink, under) + 0.05) > 7, frame
            assert int(str(frame["texts"])) > 10
    assert all(shot.stat().st_size > 50_000 for shot in shots.values())
    assert shots["light"].read_bytes() != shots["dark"].read_bytes()
