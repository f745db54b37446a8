from dataclasses import replace

from worker.product_shapes import DecoderSizes, ProductShape, rank_products

SIZES = DecoderSizes(hidden=96, intermediate=160, heads=6, kv_heads=2, head_dim=16, vocabulary=131)


def test_one_rank():
    assert rank_products(SIZES, tp=1) == (
        ProductShape("qkv", 160, 96),
        ProductShape("output", 96, 96),
        ProductShape("gate_up", 320, 96),
        ProductShape("down", 96, 160),
        ProductShape("head", 131, 96),
    )


def test_the_second_of_two_ranks():
    assert rank_products(SIZES, tp=2, rank=1) == (
        ProductShape("qkv", 80, 96),
        ProductShape("output", 96, 48),
        ProductShape("gate_up", 160, 96),
        ProductShape("down", 96, 80),
        ProductShape("head", 65, 96),
    )


def test_experts_are_no_products_of_this_kind():
    names = [shape.name for shape in rank_products(replace(SIZES, intermediate=0), tp=2)]
    assert names == ["qkv", "output", "head"]
