"""Plans, counters and resumed runs in notebooks: ordinary values that a cell shows as tables."""

from __future__ import annotations

import copy
import json
import pickle
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import torch
from torch import nn

import memascend
from memascend.common.html import Markup, escape, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Cells(HTMLParser):
    """The texts of a page's cells and captions; every element must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))


def test_plans(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(layers())
    plan = memascend.plan_of(model)
    session = memascend.offload_of(model)
    assert plan == session.plan.table() and isinstance(plan, str)
    texts = Cells(plan._repr_html_()).texts
    for line in session.plan.lines:
        assert (line.consumer in texts) == bool(line.count)
    assert f"host memory: {memascend.format_size(session.plan.total)} of a budget of 256.0 MiB" in texts
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_counters(offloaded: Callable[..., nn.Module], store: Path) -> None:
    stats = memascend.stats(offloaded(layers(), store=store.with_name("<b>&")))
    assert isinstance(stats, dict) and json.loads(json.dumps(stats))["engine"] == stats["engine"]
    assert pickle.loads(pickle.dumps(stats)) == stats == dict(stats)
    texts = Cells(stats._repr_html_()).texts
    assert str(store.with_name("<b>&")) in texts, "text from outside is escaped"
    assert memascend.format_size(stats["host_bytes_budget"]) in texts
    assert {"SSD read", "compute", "ssd_bytes_written", "197,376"} <= set(texts)


def test_resumed_runs(offloaded: Callable[..., nn.Module], store: Path) -> None:
    model = offloaded(layers(), keep_store=True)
    optimizer = memascend.AdamW(model.parameters())
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    memascend.close(model)
    resumed = memascend.resume(store, model=layers(), allocator="pageable")
    texts = Cells(resumed._repr_html_()).texts
    assert {"Sequential, 0.2M parameters", "AdamW", "1", str(store)} <= set(texts)
    memascend.close(resumed.model)
    assert "AdamW" in resumed._repr_html_()


def test_escaping() -> None:
    assert escape("<a href=\"x\" y='z'>&") == "&lt;a href=&quot;x&quot; y=&#x27;z&#x27;&gt;&amp;"
    assert escape(Markup("<b>")) == "<b>" and escape(3) == "3"
    assert Cells(table("<c>", ("<h>",), [("<r>", 1.5)])).texts == ["<c>", "<h>", "<r>", "1.5"]
