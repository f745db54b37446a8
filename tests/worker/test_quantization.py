import pytest

from protocol.errors import ConfigError
from worker.product_shapes import ProductShape
from worker.quantization import bytes_saved, check_storage, choose_storage, fits_fp8
from worker.quantization_config import Fp8Checkpoint, Int4Checkpoint, Unquantized

FOUR_BITS = Int4Checkpoint(
    is_awq=True, group_size=32, has_order=False, zero_offset=0, unquantized=Unquantized()
)


def test_the_flag_decides():
    checkpoint = Fp8Checkpoint(
        scale_name="weight_scale", block=None, is_by_tensor=True, unquantized=Unquantized()
    )
    assert choose_storage("fp8", None) == choose_storage("fp8", checkpoint) == "fp8"
    assert choose_storage("none", None) == choose_storage("none", checkpoint) == "none"
    assert choose_storage("auto", None) == "none"
    assert choose_storage("auto", checkpoint) == "fp8"
    assert choose_storage("auto", FOUR_BITS) == "int4"
    assert choose_storage("none", FOUR_BITS) == "none"
    with pytest.raises(ConfigError, match="use auto, or none"):
        choose_storage("fp8", FOUR_BITS)


@pytest.mark.parametrize("capability", [None, (8, 9), (9, 0), (10, 0)])
def test_where_fp8_runs(capability: tuple[int, int] | None):
    check_storage("fp8", capability=capability, dtype="bfloat16", flag="fp8")
    check_storage("none", capability=(7, 0), dtype="float16", flag="auto")
    check_storage("fp8", capability=None, dtype="float32", flag="fp8")


def test_gpus_and_dtypes_that_cannot():
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* 8\.9 or later .* has 8\.0"):
        check_storage("fp8", capability=(8, 0), dtype="bfloat16", flag="fp8")
    with pytest.raises(ConfigError, match="use --dtype bfloat16"):
        check_storage("fp8", capability=(9, 0), dtype="float16", flag="fp8")


def test_bytes():
    shape = ProductShape("down", 64, 160)
    assert bytes_saved("fp8", shape, 2) == 64 * 160 * 2 - (64 * 160 + 64 * 4)
    assert bytes_saved("none", shape, 2) == 0
    kept = 64 * 160 // 2 + 64 * 5 * (2 + 1)
    assert bytes_saved("int4", shape, 2, FOUR_BITS) == 64 * 160 * 2 - kept
    assert not fits_fp8(64, 168)
    assert bytes_saved("fp8", ProductShape("down", 64, 168), 2) == 0
