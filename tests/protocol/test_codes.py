import msgspec
import numpy as np
import pytest

from protocol.errors import ErrorCode
from protocol.messages import FinishReason


@pytest.mark.parametrize(
    ("code", "number", "name"),
    [(FinishReason.ABORT, 3, "ABORT"), (ErrorCode.OVERLOADED, 103, "OVERLOADED")],
)
def test_a_code_is_a_number_on_the_wire_and_a_name_in_print(code, number, name):
    assert str(code) == f"{code}" == f"{code:s}" == name
    assert code == number
    assert msgspec.msgpack.encode(code) == msgspec.msgpack.encode(number)
    assert np.array([code], np.int32).tobytes() == np.array([number], np.int32).tobytes()
