import logging

import pytest

from protocol.logs import MAX_MESSAGE_LENGTH, set_up_logging


@pytest.fixture
def log():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield logging.getLogger("test")
    root.handlers[:] = before
    root.setLevel(level)


def test_an_event_is_one_line_whatever_it_tells(log, capsys):
    set_up_logging("scheduler", "info")
    log.info("refused %s", "x\n12:00:00 I scheduler forged \x1b[2J")
    log.info("long %s", "y" * 2 * MAX_MESSAGE_LENGTH)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(r" I scheduler   refused x\n12:00:00 I scheduler forged \x1b[2J")
    assert len(second) < MAX_MESSAGE_LENGTH + 50


def test_a_stack_keeps_its_lines(log, capsys):
    set_up_logging("scheduler", "info")
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("failed")
    assert capsys.readouterr().err.splitlines()[-1] == "ValueError: x"
