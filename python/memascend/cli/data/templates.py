"""Chat templates as transformers compiles them: with a clock that stands still, and without endless loops.

Of transformers' private names this module uses `chat_template_utils._compile_jinja_template`, which returns the one
compiled template that it keeps for a text (5.17 to 5.20).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from memascend.errors import CheckpointError

#: The function by which a template asks for the time.
_CLOCK = "strftime_now"
#: Tags of transformers' own, which jinja2 does not know.
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def stop_clock(templates: Iterable[str], clock: datetime) -> None:
    """Have templates write the time `clock`, whenever they are rendered.

    Raises CheckpointError where a template asks for the time and this version of transformers keeps it otherwise.
    """
    asking = [template for template in templates if _CLOCK in template]
    if not asking:
        return
    from transformers import __version__
    from transformers.utils import chat_template_utils

    try:
        for template in asking:
            chat_template_utils._compile_jinja_template(template).environment.globals[_CLOCK] = clock.strftime
    except AttributeError as error:
        raise CheckpointError(
            f"the chat template writes the date ({_CLOCK}), which would be another one when the run goes on, and it "
            f"cannot be kept with transformers {__version__}: write the date into the template"
        ) from error
    except Exception:  # of the template itself, which rendering says
        return


def refuse_powers(templates: Iterable[str]) -> None:
    """Raise CheckpointError for a template that takes a power, which can be one step without end."""
    import jinja2
    from jinja2 import nodes

    for template in templates:
        if "**" not in template:
            continue
        try:
            parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", template))
        except jinja2.TemplateError:  # which rendering says
            continue
        if parsed.find(nodes.Pow) is not None:
            raise CheckpointError("the chat template takes a power (**), as none needs to: it is made to do harm")
