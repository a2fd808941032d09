"""Uploads of transformers' Trainer, which sends its whole output directory: without the stores that lie in it.

Uses names of `transformers.trainer` that are not documented: `hf_api` (5.23) or `upload_folder` (before). Where both
are missing an upload is refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import transformers.trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The files of a volume, in any folder.
STORE_FILES = ("*memascend.volume*", "*memascend.json*", "*memascend.lock*")


class _Api:
    """An API of the hub whose uploads leave stores out."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *given: Any, **named: Any) -> Any:
        """Upload as the API does, without stores."""
        return _without_stores(self._api.upload_folder)(*given, **named)


def _without_stores(upload: Callable[..., Any]) -> Callable[..., Any]:
    def upload_folder(*given: Any, **named: Any) -> Any:
        ignored = named.get("ignore_patterns") or ()
        named["ignore_patterns"] = [*([ignored] if isinstance(ignored, str) else ignored), *STORE_FILES]
        return upload(*given, **named)

    return upload_folder


@contextmanager
def stores_left_out() -> Iterator[None]:
    """Have uploads of transformers' Trainer meanwhile leave out every store under its output directory.

    Raises ValueError where this version of transformers uploads in another way.
    """
    module: Any = transformers.trainer
    if hasattr(module, "hf_api"):
        name, own = "hf_api", module.hf_api
        replaced: Any = lambda *given, **named: _Api(own(*given, **named))  # noqa: E731
    elif hasattr(module, "upload_folder"):
        name, own = "upload_folder", module.upload_folder
        replaced = _without_stores(own)
    else:
        raise ValueError(
            f"transformers {transformers.__version__} uploads in a way that memascend does not know, and the store in "
            "the output directory would go with it: use save_model(), and upload that directory yourself"
        )
    setattr(module, name, replaced)
    try:
        yield
    finally:
        setattr(module, name, own)
