"""Builds the runner that a worker's flags ask for."""

from pathlib import Path

from protocol.errors import ConfigError
from protocol.messages import EngineFacts
from worker.checksum import NUM_LAYERS
from worker.checksum_runner import BACK_END, ChecksumRunner
from worker.config import WorkerConfig
from worker.faults import Faults
from worker.model_files import read_model_config
from worker.runner import StepRunner

FAKE_BLOCK_SIZE = 16
FAKE_NUM_BLOCKS = 8192
"""2 MiB of words; of host blocks there are as many at most."""
FAKE_SWAP_BLOCK_S = 0.0
"""Moving words is always cheaper than hashing them again."""
FAKE_MAX_NUM_SEQS = 64
FAKE_MAX_MODEL_LEN = 8192
FAKE_VOCAB_SIZE = 32_000


def build_runner(config: WorkerConfig) -> StepRunner:
    """Return the runner, ready to execute; this may take minutes.

    Raises ConfigError for flags that do not fit model or machine, ModelFileError for model files
    that cannot be used.
    """
    if config.fake_workers:
        return _fake_runner(config)
    # Imported here so that checksum ranks start without torch.
    from worker.model_setup import build_model_runner  # noqa: PLC0415

    return build_model_runner(config)


def _fake_host_blocks(config: WorkerConfig) -> int:
    block_bytes = 8 * NUM_LAYERS * (config.block_size or FAKE_BLOCK_SIZE)
    return min(int(config.swap_space_gib * 2**30) // block_bytes, FAKE_NUM_BLOCKS)


def _fake_runner(config: WorkerConfig) -> ChecksumRunner:
    """Return a checksum runner of the model's sizes, or of made-up ones without a model."""
    max_model_len, vocab_size = FAKE_MAX_MODEL_LEN, FAKE_VOCAB_SIZE
    if config.model:
        model = read_model_config(Path(config.model))
        max_model_len, vocab_size = model.sequence_limit(None), model.vocab_size
    facts = EngineFacts(
        rank=config.rank,
        back_end=BACK_END,
        block_size=config.block_size or FAKE_BLOCK_SIZE,
        num_blocks=config.num_blocks or FAKE_NUM_BLOCKS,
        slots=config.max_num_seqs or FAKE_MAX_NUM_SEQS,
        max_model_len=config.max_model_len or max_model_len,
        vocab_size=vocab_size,
        host_blocks=_fake_host_blocks(config),
        swap_block_s=FAKE_SWAP_BLOCK_S,
    )
    faults = None if config.faults == Faults() else config.faults
    try:
        return ChecksumRunner(facts, tp=config.tp, faults=faults, fault_seed=config.seed)
    except MemoryError as error:
        raise ConfigError(
            f"A cache of {facts.num_blocks} blocks of {facts.block_size} positions and "
            f"{facts.slots} slots of {facts.max_model_len} tokens do not fit into memory; lower "
            "--num-blocks, --block-size, --max-num-seqs or --max-model-len."
        ) from error
