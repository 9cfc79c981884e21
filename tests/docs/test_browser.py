"""The site in a real browser, at the widths of a phone and of a desktop.

A probe page opens every page in two frames, measures them, searches, follows a link of the
navigation, and posts what it found to the server that the site comes from.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from docs.pages import ROOT

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
]
WIDTHS = (400, 1280)
# What a newcomer types, and a page that must be among the answers.
SEARCHES = {
    "AMD": "not-supported.html",
    "license": "not-supported.html",
    "cite": "not-supported.html",
    "FlashMLA": "peers.html",
    "mla_prefill_sparse": "api.html",
}
PROBE = """<!doctype html><body><script>
const PAGES = %(pages)s, WIDTHS = %(widths)s, SEARCHES = %(searches)s;
const pause = ms => new Promise(done => setTimeout(done, ms));
const found = {wide: [], cut: [], pages: 0, search: {}, navigation: ''};
const open = (frame, url) => new Promise(done => { frame.onload = done; frame.src = url; });
async function until(test) {
  for (let i = 0; i < 200; i++) { const got = test(); if (got) return got; await pause(50); }
}
async function main() {
  const frames = WIDTHS.map(width => {
    const frame = document.createElement('iframe');
    frame.style.cssText = `width:${width}px;height:900px;border:0`;
    document.body.append(frame);
    return frame;
  });
  for (const page of PAGES) {
    await Promise.all(frames.map(frame => open(frame, page)));
    for (const frame of frames) {
      const root = frame.contentDocument.documentElement, width = frame.clientWidth;
      found.pages++;
      if (root.scrollWidth > width) found.wide.push(`${page} at ${width}: ${root.scrollWidth}`);
      for (const img of frame.contentDocument.images)
        if (!img.naturalWidth) found.cut.push(`${page} at ${width}: ${img.src} does not load`);
    }
  }
  const [, desktop] = frames;
  await open(desktop, 'index.html');
  const asked = desktop.contentDocument.querySelector('[data-md-component=search-query]');
  asked.focus();
  for (const words of Object.keys(SEARCHES)) {
    asked.value = words;
    asked.dispatchEvent(new Event('keyup', {bubbles: true}));
    asked.dispatchEvent(new Event('input', {bubbles: true}));
    const links = () => [...desktop.contentDocument.querySelectorAll('.md-search-result__link')]
      .map(link => link.getAttribute('href'));
    await until(() => links().some(link => link.includes(SEARCHES[words])));
    found.search[words] = links();
  }
  await open(desktop, 'index.html');
  desktop.contentDocument.querySelector('.md-nav a[href="which-call.html"]').click();
  found.navigation = await until(() => {
    const title = desktop.contentDocument && desktop.contentDocument.title;
    return title && title.includes('Which call') ? title : '';
  });
  await open(frames[0], 'which-call.html');
  const picture = frames[0].contentDocument.querySelector('img[src$="which-call.svg"]');
  found.picture = picture.getBoundingClientRect().width;
}
main().catch(error => { found.error = String(error.stack || error); })
  .then(() => fetch('found', {method: 'POST', body: JSON.stringify(found)}));
</script></body>
"""


class Server(SimpleHTTPRequestHandler):
    """The site, and a place where the probe puts what it found."""

    found: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def do_POST(self) -> None:
        """What the probe found."""
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = sorted(path.name for path in folder.glob("*.html") if path.name != "404.html")
    values = {"pages": pages, "widths": WIDTHS, "searches": SEARCHES}
    probe = PROBE % {name: json.dumps(value) for name, value in values.items()}
    (folder / "probe.html").write_text(probe)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/probe.html"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def seen(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe found, and the lines of the console."""
    assert CHROMIUM is not None
    log = tmp_path_factory.mktemp("browser") / "log"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={log.parent / 'profile'}", "--window-size=1700,1000"]
    with log.open("w") as stderr:
        # With a port for a debugger it stays until it is ended.
        command = [CHROMIUM, *options, "--remote-debugging-port=0", address]
        browser = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)
        try:
            found = Server.found.get(timeout=240)
        except Empty:
            pytest.fail(f"the probe never answered: {log.read_text()[-2000:]}")
        finally:
            browser.kill()
            browser.wait()
    console = [line for line in log.read_text().splitlines() if "CONSOLE" in line]
    return {**found, "console": console}


def test_the_probe_ran_to_its_end(seen: dict[str, Any], site: Path):
    assert "error" not in seen
    assert seen["pages"] == len(WIDTHS) * (len(list(site.glob("*.html"))) - 2) >= 50


def test_no_page_is_wider_than_its_window_and_every_picture_loads(seen: dict[str, Any]):
    assert seen["wide"] == [] and seen["cut"] == []


@pytest.mark.parametrize(("words", "page"), SEARCHES.items())
def test_search_finds(seen: dict[str, Any], words: str, page: str):
    assert any(page in link for link in seen["search"][words]), seen["search"][words]


def test_the_navigation_leads_to_a_page(seen: dict[str, Any]):
    assert "Which call" in (seen["navigation"] or "")


def test_a_phone_shows_the_picture_of_which_call_whole(seen: dict[str, Any]):
    assert 200 < seen["picture"] <= WIDTHS[0]


def test_the_console_has_no_message(seen: dict[str, Any]):
    assert [line for line in seen["console"] if not re.search(r"favicon", line)] == []
