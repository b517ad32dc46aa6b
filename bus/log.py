"""structlog JSON lines on standard error: every line with role, index and incarnation, and step and request if any."""

import logging
import sys
from typing import Any

import structlog

Logger = Any


def configure(role: str, index: int, incarnation: int, level: str) -> None:
    """Set this process's logging up; standard-library loggers of libraries come out as the same JSON lines."""
    shared = [
        _constant(role=role, index=index, incarnation=incarnation),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
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
