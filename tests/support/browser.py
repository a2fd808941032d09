"""Pages in headless Chromium: results of a script, and output of the console."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import requirements

if TYPE_CHECKING:
    from pathlib import Path

_RESULT = re.compile(r'<pre id="result">(.*?)</pre>', re.DOTALL)
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

#: Functions for every script.
TOOLS = """
    const tell = (result) => {
      const made = document.createElement("pre");
      made.id = "result";
      made.textContent = JSON.stringify(result);
      document.body.append(made);
    };
    const figures = [...document.querySelectorAll("figure.plot")];
    const text = (element) => element.hidden ? null : element.innerText.replace(/\\s+/g, " ").trim();
    const hover = (figure, share) => {
      const canvas = figure.querySelector(".canvas"), box = canvas.getBoundingClientRect();
      const at = { clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true };
      canvas.dispatchEvent(new PointerEvent("pointermove", at));
      return text(figure.querySelector(".tip"));
    };
"""


class Browser:
    """Chromium, with a profile of its own for each page."""

    def __init__(self, folder: Path) -> None:
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            requirements.unmet("chromium", "there is no chromium")
        self._program, self._folder, self._pages = found, folder, 0

    def open(self, page: Path, *flags: str) -> tuple[str, list[str]]:
        """Load a page; return its elements after its scripts have run, and the messages of the console."""
        self._pages += 1
        done = subprocess.run(
            [
                self._program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
                *("--enable-logging=stderr", f"--user-data-dir={self._folder / f'profile{self._pages}'}"),
                *("--virtual-time-budget=3000", "--dump-dom", *flags, page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def run(self, page: Path, script: str, *flags: str, width: int | None = None) -> Any:
        """Return the result of `script` on a page: it calls `tell(result)` once. The page must say nothing else.

        The script is put into a copy without the policy that forbids it. `width`, in pixels, is set by a frame around
        the page: a window has a least width.
        """
        source, removed = _POLICY.subn("", page.read_text())
        assert removed == 1
        copy = self._folder / f"copy{self._pages}.html"
        if width is None:
            copy.write_text(source.replace("</body>", f"<script>{TOOLS}{script}</script></body>"))
        else:
            told = TOOLS.replace("document.body.append(made)", 'parent.postMessage(made.textContent, "*")')
            inner = source.replace("</body>", f"<script>{told}{script}</script></body>")
            listen = f"{TOOLS} addEventListener('message', (event) => tell(JSON.parse(event.data)));"
            frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(inner)}"></iframe>'
            copy.write_text(f"<!doctype html><html><body><script>{listen}</script>{frame}</body></html>")
        elements, messages = self.open(copy, *flags)
        assert not messages, messages
        results = _RESULT.findall(elements)
        assert results, "the script told nothing"
        return json.loads(html.unescape(results[-1]))
