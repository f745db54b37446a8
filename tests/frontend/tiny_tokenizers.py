"""Tokenizers of the kinds that models have, trained in milliseconds."""

import json

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = ["the capital of France is Paris", "the sea, the sea", "hello hello world"] * 4
UNKNOWN = "<unk>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*special):
    """Qwen's and Llama 3's kind: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace_bpe():
    """Llama 2's and Mistral's kind: BPE with byte fallback, a space before the text, a BOS."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # The trainer makes the bytes special too, which they are not in such a model.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return _with_bos(Tokenizer.from_str(json.dumps(content)))


def unigram():
    """T5's and XLM-R's kind: unigram pieces, a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token=UNKNOWN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_bos(tokenizer)


def _with_bos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
