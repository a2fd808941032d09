"""The report in a browser: nothing in the console, every plot drawn, values shown, on phones and in the dark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import metrics_file
import pytest
from browser import Browser

from memascend.report.page import page_of
from memascend.report.run import read_run

if TYPE_CHECKING:
    from pathlib import Path

DARK = "--blink-settings=preferredColorScheme=0"
PLOTS = {"loss", "lr", "norm", "speed", "time", "bytes", "rate", "memory", "process"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    out = folder / "report.html"
    out.write_text(page_of(read_run(metrics_file.usual(folder / "metrics.jsonl")), tbw=600))
    return out


def test_the_console_stays_silent(browser: Browser, page: Path) -> None:
    """The page as it is written: its policy lets its own script run."""
    elements, messages = browser.open(page)
    assert not messages
    assert elements.count("<figure") == len(PLOTS)
    noisy = page.with_name("noisy.html")
    noisy.write_text(page.read_text().replace("</main>", '</main><script>console.error("heard")</script>'))
    _, messages = browser.open(noisy)
    assert messages and "heard" not in "".join(messages), "a script that is not its own is refused, which is heard"


def test_every_plot_is_drawn(browser: Browser, page: Path) -> None:
    drawn = browser.run(
        page,
        """
        tell(figures.map((figure) => {
          const paths = [...figure.querySelectorAll("svg path:not(.grid)")];
          const canvas = figure.querySelector(".canvas").getBoundingClientRect();
          const boxes = paths.map((path) => path.getBoundingClientRect());
          return {
            name: figure.id,
            lengths: paths.filter((path) => !path.matches(".dots")).map((path) => path.getTotalLength()),
            inside: boxes.every((box) => box.left >= canvas.left - 1 && box.right <= canvas.right + 1
              && box.top >= canvas.top - 1 && box.bottom <= canvas.bottom + 1),
            width: Math.max(...boxes.map((box) => box.width)) / canvas.width,
            ticks: [...figure.querySelectorAll(".y span")].map((tick) => tick.innerText),
            titled: figure.querySelector("svg title").textContent && figure.querySelector("svg desc").textContent,
          };
        }));
        """,
    )
    assert {plot["name"] for plot in drawn} == PLOTS
    for plot in drawn:
        assert plot["lengths"] and min(plot["lengths"]) > 0, plot
        assert plot["inside"] and plot["width"] > 0.98, plot
        assert len(plot["ticks"]) >= 2 and plot["titled"], plot


def test_hovering_shows_the_values_of_a_step(browser: Browser, page: Path) -> None:
    shares = [0.0, 0.51, 1.0]
    script = f"tell(Object.fromEntries(figures.map((f) => [f.id, {shares}.map((share) => hover(f, share))])));"
    told: dict[str, list[str]] = browser.run(page, script)
    for texts in told.values():
        assert [text.split()[1] for text in texts] == ["1", "31", "60"]
    record = metrics_file.step(31)
    assert told["loss"][1] == f"step 31 loss {record['loss']:.4g}"
    assert told["loss"][2].endswith("evaluated 4")
    assert told["speed"][1] == "step 31 tokens/s 287 tokens/s"
    assert "SSD read 0.5 s" in told["time"][1] and "total 2 s" in told["time"][1] and "H2D" not in told["time"][1]
    assert "/nvme0/run: read 60 MiB" in told["bytes"][1]
    assert "/nvme1/run 293.6 MB/s" in told["rate"][1]
    assert told["memory"][1] == "step 31 in use after the step 30 MiB peak 40 MiB budget 64 MiB"


def test_the_keyboard_shows_values_too(browser: Browser, page: Path) -> None:
    told = browser.run(
        page,
        """
        const figure = figures[0], canvas = figure.querySelector(".canvas"), tip = figure.querySelector(".tip");
        tell(["ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home", "ArrowLeft", "Escape"].map((key) => {
          canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          return text(tip);
        }));
        """,
    )
    assert [None if text is None else text.split()[1] for text in told] == ["1", "2", "60", "59", "1", "1", None]


@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_the_screen(browser: Browser, page: Path, width: int) -> None:
    found: dict[str, Any] = browser.run(
        page,
        """
        const overlaps = (spans, from, to) => spans.some((one, index) => index
          && one.getBoundingClientRect()[from] < spans[index - 1].getBoundingClientRect()[to] - 1);
        const labels = [...document.querySelectorAll(".x span, .y span, .legend li, td, th, dd, dt, p, caption")];
        const inTable = (element) => element.closest(".scroll");
        tell({
          width: innerWidth,
          needed: document.documentElement.scrollWidth,
          smallest: Math.min(...labels.map((label) => parseFloat(getComputedStyle(label).fontSize))),
          outside: labels.filter((label) => !inTable(label)).filter((label) => {
            const box = label.getBoundingClientRect();
            return box.left < 0 || box.right > innerWidth;
          }).map((label) => label.innerText),
          clashing: figures.filter((figure) =>
            overlaps([...figure.querySelectorAll(".x span")], "left", "right")).map((figure) => figure.id),
          plots: figures.map((figure) => figure.querySelector(".canvas").clientWidth),
          tips: figures.flatMap((figure) => [0, 0.4, 1].map((share) => {
            hover(figure, share);
            const box = figure.querySelector(".tip").getBoundingClientRect();
            return box.left >= 0 && box.right <= innerWidth;
          })).every(Boolean),
        });
        """,
        width=width,
    )
    assert found["width"] == width and found["needed"] <= width, found
    assert found["smallest"] >= 12 and not found["outside"] and not found["clashing"], found
    assert min(found["plots"]) > 0.75 * min(width, 500) and found["tips"], found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_the_page(browser: Browser, page: Path, scheme: str) -> None:
    found = browser.run(
        page,
        """
        const luminance = (colour) => {
          const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
            .map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const page = luminance(getComputedStyle(document.body).backgroundColor);
        const contrast = (element) => {
          const mine = luminance(getComputedStyle(element).color);
          return (Math.max(mine, page) + 0.05) / (Math.min(mine, page) + 0.05);
        };
        const least = (what) => Math.min(...[...document.querySelectorAll(what)].map(contrast));
        const texts = "h1, h2, h3, p, td, th, dd, caption, .x span, .y span";
        tell({ page, text: least(texts), lines: least("svg path[class*=c]") });
        """,
        *([DARK] if scheme == "dark" else []),
    )
    assert (found["page"] < 0.1) == (scheme == "dark")
    assert found["text"] >= 4.5 and found["lines"] >= 3, found


def test_a_hostile_file_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    """Even without the policy: values from the file stay text."""
    attack = "document.documentElement.dataset.owned = 1"
    evil = f"</script><script>{attack}</script><img src=x onerror='{attack}'>\"><svg onload=\"{attack}\">'-->"
    settings = {evil: evil, "model_dir": f"/models/{evil.replace('/', '')}", "lr": {evil: [evil]}}
    plan = {"host": {"lines": [{"consumer": evil, "count": 1, "nbytes": evil, "total_bytes": 5, "note": evil}]}}
    store = {"volumes": [{"path": evil}, {"path": [evil]}], "notices": [evil], "engine": evil}
    first = metrics_file.opening(settings=settings, machine={evil: evil}, plan=plan, store=store, steps=evil)
    records = [metrics_file.step(number, **{evil: evil}) for number in range(1, 5)]
    strange = metrics_file.step(5, loss=evil, lr=[evil], volumes=[[evil, 1, 2]], waited_seconds={"compute": evil})
    out = tmp_path / f"{'<b>evil'}.html"
    out.write_text(page_of(read_run(metrics_file.write(tmp_path / "<i>.jsonl", first, *records, strange)), tbw=1))
    found = browser.run(
        out,
        """
        figures.forEach((figure) => hover(figure, 0.5));
        tell({ owned: document.documentElement.dataset.owned, title: document.title,
          strangers: document.querySelectorAll("img, b b, i, svg svg, main script:not(.values)").length });
        """,
    )
    assert "owned" not in found and found["strangers"] == 0 and "onerror" in found["title"], found


def test_thousands_of_steps(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text(page_of(read_run(metrics_file.usual(tmp_path / "metrics.jsonl", steps=5000))))
    assert out.stat().st_size < 1_000_000
    told = browser.run(out, "tell(Object.fromEntries(figures.map((figure) => [figure.id, hover(figure, 1)])));")
    assert {text.split()[1] for text in told.values()} == {"5,000"}
