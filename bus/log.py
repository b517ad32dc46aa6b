"""structlog JSON lines on standard error: every line with role, index and incarnation, and step and request if any."""

import logging
import sys
from collections import deque
from typing import Any, NamedTuple

# structlog imports rich where there is one, to draw tracebacks for a terminal: a fifth of the time in which a rank
# starts, for lines that are JSON. So there is none while it is imported.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402

del sys.modules["rich"]
if _rich is not None:
    sys.modules["rich"] = _rich

Logger = Any


class Line(NamedTuple):
    """A line of the log, for people; `at` is its time as it was logged."""

    at: str
    level: str
    text: str


recent: deque[Line] = deque(maxlen=50)
"""The latest warnings and errors of this process."""


def configure(role: str, index: int, incarnation: int, level: str) -> None:
    """Set this process's logging up; standard-library loggers of libraries come out as the same JSON lines."""
    shared = [
        _constant(role=role, index=index, incarnation=incarnation),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _remember,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))


def get_logger() -> Logger:
    """A logger for any module, used as ``log.info("what happened", key=value)``."""
    return structlog.get_logger()


def _remember(_logger: Any, _name: str, event: dict[str, Any]) -> dict[str, Any]:
    """Keep warnings and errors in `recent`."""
    level = event.get("level", "")
    if level in ("warning", "error", "critical"):
        said = (f"{key}={event[key]}" for key in ("peer", "request_id", "reason", "detail") if event.get(key))
        text = ", ".join([str(event.get("event", "")), *said])
        if event.get("exception"):
            text += f": {str(event['exception']).strip().splitlines()[-1]}"
        recent.append(Line(str(event.get("timestamp", "")), str(level), text[:500]))
    return event


def _constant(**values: Any) -> Any:
    """Put `values` on every line, of every thread."""

    def processor(_logger: Any, _name: str, event: dict[str, Any]) -> dict[str, Any]:
        return values | event

    return processor


# In a process that sets no logging up (a script with the client library) standard output is the script's own
structlog.configure(
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    logger_factory=structlog.PrintLoggerFactory(sys.stderr),
)
