"""One log format for all processes, on stderr.

    12:04:31.401 I worker-0    weights loaded bytes=98340864 seconds=1.4

One line is one event: a few words, then key=value. Never a token, never a prompt's text.
"""

import logging
import sys

from protocol.plain_line import plain_line

MAX_MESSAGE_LENGTH = 4096


class _LineFormatter(logging.Formatter):
    """Keeps an event on one line: its values may be anybody's."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = plain_line(record.message, MAX_MESSAGE_LENGTH)
        return super().formatMessage(record)


def set_up_logging(process_name: str, level: str) -> None:
    """Send this process's log to stderr under its name. Called once, before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _LineFormatter(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {process_name:<11} %(message)s",
            datefmt="%H:%M:%S",
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
