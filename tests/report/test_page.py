"""The page of a report: whole and valid HTML, honest plots, nothing of the file as markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import metrics_file
import pytest

from memascend.errors import OutputError
from memascend.report.html import Markup, escape, table
from memascend.report.page import HEAD, page_of, write_page
from memascend.report.run import read_run
from memascend.report.scales import Axis, drawn, shown, unit_for

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "path", "br"}


class Page(HTMLParser):
    """A page's elements; each must be closed in its turn, and every id is unique."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in self.elements:
            assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def plots(self) -> list[str | None]:
        return [attributes["id"] for tag, attributes in self.elements if tag == "figure"]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def page(tmp_path: Path, *records: Any, tbw: float | None = None) -> Page:
    return Page(page_of(read_run(metrics_file.write(tmp_path / "metrics.jsonl", *records)), tbw))


def test_a_whole_page(tmp_path: Path) -> None:
    source = page_of(read_run(metrics_file.usual(tmp_path / "metrics.jsonl")), tbw=600)
    made = Page(source)
    assert source.startswith(HEAD) and len(made.plots) == 9
    for told in ("Fine-tuning of llama", "step 60 of 100", "6.0 M", "buffered I/O is used", "100 MiB", "24.0 GiB"):
        assert told.replace("100 MiB", "100.0 MiB") in made.text, told
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org)", source), "nothing is fetched"
    (script,) = re.findall(r"<script>(.*?)</script>", source, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source, "the policy lets the script run"


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    text = page(tmp_path, metrics_file.opening(), metrics_file.step(1), metrics_file.end()).text
    assert "memory of memascend 60.0 MiB 40.0 MiB 67%" in text
    assert "SSD read in a step 110.0 MiB 100.0 MiB 91%" in text
    assert "weights of layer 3 × 1024.0 KiB 3.0 MiB 2.0 MiB x" in text, "by the size of a buffer, in whole pages"


def test_each_rank_has_a_row(tmp_path: Path) -> None:
    mib = metrics_file.MIB

    def ranks(number: int) -> list[Any]:
        return [[512, 2.0, mib, 2 * mib, 0, 40 * mib, 480 * mib], [256, 4.0, mib, mib, number * mib, None, 500 * mib]]

    steps = [metrics_file.step(number, ranks=ranks(number)) for number in (1, 2)]
    strange = [metrics_file.step(3, ranks="x"), metrics_file.step(4, ranks=[None, [1, "<b>", {}], {}])]
    text = page(tmp_path, metrics_file.opening(), *steps, *strange).text
    assert "0 2 256 2.10 MB 4.19 MB 0.00 MB 40.0 MiB 480.0 MiB" in text
    # Tokens of the third step, which has no seconds, count too.
    assert "1 4 64.12 2.10 MB 2.10 MB 3.15 MB – 500.0 MiB" in text
    assert "Each rank" not in page(tmp_path, metrics_file.opening(), metrics_file.step(1)).text


def test_wear(tmp_path: Path) -> None:
    steps = [metrics_file.step(number) for number in range(1, 11)]
    text = page(tmp_path, metrics_file.opening(), *steps, tbw=0.1).text
    # 50 MiB in each step of 2 s
    assert "/nvme0/run 524.29 MB 52.43 MB 2.26 TB 0.5243% of 0.1 TB 0" in text
    assert "With --tbw" in page(tmp_path, metrics_file.opening(), *steps).text


def test_written_bytes_are_forecast_by_kind_and_measured_in_sum(tmp_path: Path) -> None:
    steps = [metrics_file.step(number) for number in range(1, 11)]
    text = page(tmp_path, metrics_file.opening(), *steps).text
    assert "weights 20.00 MB 200.00 MB –" in text and "exp_avg 60.00 MB 600.00 MB –" in text
    # 80 MiB in each of ten steps.
    assert "all of them 80.00 MB 800.00 MB 838.86 MB, 83.89 MB a step" in text
    assert "--states 8bit 50.00 MB 38%" in text
    for endurance in (
        [],
        {"step": 3, "savings": {}},
        {"step": {"weights_bytes": "x"}, "savings": [None, {"saved": 1}]},
    ):
        opening = metrics_file.opening(forecast={"endurance": endurance})
        strange = page(tmp_path, opening, *steps).text
        assert "Written by kind" not in strange and "would write less" not in strange


def test_the_endurance_that_a_run_was_given_is_the_reports(tmp_path: Path) -> None:
    def text(tbw: Any) -> str:
        return page(tmp_path, metrics_file.opening(settings={"tbw": tbw}), metrics_file.step(1)).text

    assert "% of 600 TB" in text(600)
    for nothing in (None, 0, -1, "600"):
        assert "With --tbw" in text(nothing)


def test_older_files(tmp_path: Path) -> None:
    """Without figures of volumes, plan, forecast or time; and a model in memory."""
    lacking = ("time", "plan", "forecast", "machine")
    opening = {name: value for name, value in metrics_file.opening().items() if name not in lacking}
    steps = [{k: v for k, v in metrics_file.step(n).items() if k not in ("volumes", "grad_norm")} for n in range(1, 5)]
    made = page(tmp_path, opening, *steps)
    assert {"bytes", "rate"} < set(made.plots) and "norm" not in made.plots
    assert "left out: gradient norm, figures of each volume." in made.text
    assert "over the whole step" in made.text and "all volumes" in made.text
    in_memory = dict.fromkeys(("waited_seconds", "host_bytes_in_use", "host_bytes_peak", "host_bytes_budget"))
    in_memory |= {"ssd_bytes_read": 0, "ssd_bytes_written": 0, "volumes": []}
    steps = [metrics_file.step(number, **in_memory) for number in range(1, 5)]
    made = page(tmp_path, metrics_file.opening(store={}, plan={}), *steps)
    assert set(made.plots) == {"loss", "lr", "norm", "speed", "process"}
    assert "a model in memory is not timed" in made.text


def test_one_step(tmp_path: Path) -> None:
    assert len(page(tmp_path, metrics_file.opening(), metrics_file.step(7)).plots) == 9


def test_skipped_steps_are_gaps_and_are_told(tmp_path: Path) -> None:
    steps = [metrics_file.step(n, **({"loss": None, "skipped": True} if n == 5 else {})) for n in range(1, 10)]
    source = page_of(read_run(metrics_file.write(tmp_path / "metrics.jsonl", metrics_file.opening(), *steps)))
    assert "One step was skipped" in source
    (line,) = re.findall(r'<path class="line c0" d="([^"]*)"', source[source.index('id="loss"') :])[:1]
    assert line.count("M") == 2, "two pieces"


def test_huge_and_tiny_values(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"loss": 1e99, "grad_norm": 5e-324, "lr": -1e99},
        {"loss": -1e100, "grad_norm": 1.7e308, "lr": 0, "tokens_per_s": -5},
        {"loss": 0, "grad_norm": 0, "seconds": 0, "volumes": [[-1, 0, 0], [10**30, 5, 1e-300]]},
    ]
    steps = [metrics_file.step(number, **change) for number, change in enumerate(changes, 1)]
    source = page_of(read_run(metrics_file.write(tmp_path / "metrics.jsonl", metrics_file.opening(), *steps)), 1e-300)
    Page(source)
    assert not re.search(r' d="[^"]*(nan|inf)', source)


def test_text_of_the_file_is_no_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><em id='x'>\"&"
    store = {"volumes": [{"path": evil}, {"path": evil + "2"}], "notices": [evil], "engine": evil}
    settings = {"model_dir": evil.replace("/", ""), evil: evil}
    plan = {"host": {"lines": [{"consumer": evil, "count": 1, "total_bytes": 4096, "note": evil}]}}
    opening = metrics_file.opening(store=store, settings=settings, machine={evil: evil}, plan=plan)
    made = page(tmp_path, opening, metrics_file.step(1), tbw=1)
    assert "em" not in {tag for tag, _ in made.elements}
    assert sum(tag == "script" for tag, _ in made.elements) == len(made.plots) + 1
    assert made.text.count(evil) >= 8
    values = json.loads(re.findall(r'class="values">(.*?)</script>', page_of(read_run(tmp_path / "metrics.jsonl")))[5])
    assert values["series"][0][0] == f"{evil}: read"


# ---- many steps -------------------------------------------------------------------------------------------------


def test_few_steps_are_all_drawn() -> None:
    assert drawn([[1.0, None, 3.0]], most=3) == [0, 1, 2]


def test_spikes_and_gaps_of_many_steps_stay() -> None:
    random.seed(0)
    columns: list[list[float | None]] = [[random.random() for _ in range(20_000)] for _ in range(3)]
    columns[0][7_123], columns[1][15_001], columns[2][3] = 50.0, -50.0, None
    positions = drawn(columns, most=900)
    assert {0, 3, 7_123, 15_001, 19_999} <= set(positions) and len(positions) <= 902
    assert positions == sorted(set(positions))
    for column in columns:
        everything, kept = (
            [column[p] for p in range_ if column[p] is not None] for range_ in (range(20_000), positions)
        )
        assert (min(everything), max(everything)) == (min(kept), max(kept))  # type: ignore[type-var]


def test_pages_stay_small(tmp_path: Path) -> None:
    volumes = [{"path": f"/nvme{number}/run"} for number in range(8)]
    random.seed(0)

    def moved() -> list[list[float]]:
        return [[random.randrange(1 << 30), random.randrange(1 << 30), random.random()] for _ in volumes]

    steps = [metrics_file.step(number, volumes=moved(), loss=random.random()) for number in range(1, 8001)]
    file = metrics_file.write(tmp_path / "m.jsonl", metrics_file.opening(store={"volumes": volumes}), *steps)
    assert len(page_of(read_run(file))) < 1_000_000


# ---- axes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "ticks"),
    [
        ([0.0, 10.0], {"zero": True}, [0, 5, 10]),
        ([3.0, 5.5], {}, [3, 4, 5]),
        ([7.0, 7.0], {}, [6.5, 7, 7.5]),
        ([0.0, 0.0], {}, [-1, -0.5, 0, 0.5, 1]),
        ([0.5, 2000.0], {"logarithmic": True}, [1, 10, 100, 1000]),
        ([1.0, 20.0], {"logarithmic": True, "zero": True}, [0, 5, 10, 15, 20]),
    ],
)
def test_ticks(values: list[float], options: dict[str, bool], ticks: list[float]) -> None:
    axis = Axis.around(values, **options)
    assert axis.ticks() == pytest.approx(ticks)
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_units_and_numbers() -> None:
    assert unit_for("bytes", 5 << 30) == ("GiB", 2**30) and unit_for("bytes", 0) == ("B", 1)
    assert unit_for("bytes per second", 2e9) == ("GB/s", 1e9) and unit_for("seconds", 0.5) == ("ms", 1e-3)
    texts = {
        0: "0",
        1: "1",
        1234.5: "1,234",
        0.00123456: "0.001235",
        1e-7: "1e-07",
        -2.5: "-2.5",
        1e9: "1e+09",
        100: "100",
    }
    assert {value: shown(value) for value in texts} == texts
    assert math.isclose(float(shown(math.pi)), math.pi, rel_tol=1e-3)


def test_text_is_escaped() -> None:
    assert escape("<a href=\"x\" y='z'>&") == "&lt;a href=&quot;x&quot; y=&#x27;z&#x27;&gt;&amp;"
    assert escape(Markup("<b>")) == "<b>" and escape(3) == "3"
    assert "<td>&lt;r&gt;</td>" in table("<c>", ("<h>",), [(1.5, "<r>")])


# ---- writing ----------------------------------------------------------------------------------------------------


def test_a_report_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    for text in (f"{HEAD}first", f"{HEAD}second"):
        write_page(text, out)
        assert out.read_text() == text and out.stat().st_mode & 0o777 == 0o644
    out.write_text("<html>mine</html>")
    with pytest.raises(OutputError, match="is no report of memascend"):
        write_page(HEAD, out)
    assert out.read_text() == "<html>mine</html>"
    for place in (tmp_path, tmp_path / "missing" / "report.html"):
        with pytest.raises(OutputError, match=re.escape(str(place))):
            write_page(HEAD, place)
    assert os.listdir(tmp_path) == ["report.html"]
