import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from protocol.columns import pack_int32, unpack_int32
from protocol.errors import ErrorCode
from protocol.lifecycle import HEARTBEAT_INTERVAL_S
from protocol.messages import EngineFacts, Heartbeat, Hello, Ping, Ready, Reset, Role, StepResult
from tests.worker.plan_builder import make_join, make_plan
from tests.worker.rank_driver import ROOT, RankDriver
from worker.checksum import checksum_token

pytestmark = pytest.mark.slow

PROMPT = [11, 12, 13, 14, 15, 16]
FIRST = checksum_token(PROMPT, None, 0.0, 32_000)
SECOND = checksum_token([*PROMPT, FIRST], None, 0.0, 32_000)
PREFILL = make_plan(1, joins=[make_join(0, PROMPT, [9])], chunks=[(0, 0, 6, 1)])
DECODE = make_plan(2, decode=[0])


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="tw"))
    yield path
    shutil.rmtree(path)


def comparable(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, seq=0)


# Start


def test_it_says_hello_with_its_facts_and_is_ready_once_the_scheduler_answers(
    run_dir: Path,
) -> None:
    with RankDriver(run_dir, "--num-blocks", "64", "--max-num-seqs", "3") as rank:
        hello = rank.receive(Hello)
        assert (hello.role, hello.epoch, len(hello.fingerprint)) == (Role.WORKER, 0, 64)
        assert hello.facts == EngineFacts(
            rank=0,
            back_end="checksum",
            block_size=16,
            num_blocks=64,
            slots=3,
            max_model_len=8192,
            vocab_size=32_000,
        )
        assert not any(isinstance(report, Ready) for report in rank.reports())
        rank.connection.hello(
            Hello(role=Role.SCHEDULER, identity=b"t", epoch=7, fingerprint=hello.fingerprint)
        )
        rank.wait_ready()


def test_without_a_scheduler_it_says_what_it_waits_for_and_ends_with_its_lifeline(
    run_dir: Path,
) -> None:
    with RankDriver(run_dir, listens=False) as rank:
        rank.wait_for(lambda: "waits for the scheduler" in rank.log())
        assert f"address=ipc://{run_dir}/rank-0" in rank.log()
        started = time.monotonic()
        rank.cut_lifeline()
        assert rank.exit_code() == 0
        assert time.monotonic() - started < 10


def test_a_scheduler_may_come_later(run_dir: Path) -> None:
    with RankDriver(run_dir, listens=False) as rank:
        rank.wait_for(lambda: "waits for the scheduler" in rank.log())
        rank.listen()
        rank.greet()
        rank.wait_ready()


def test_another_epoch_is_refused(run_dir: Path) -> None:
    with RankDriver(run_dir, "--epoch", "4") as rank:
        rank.greet(epoch=3)
        assert rank.failure() == "The scheduler is of epoch 3, this rank of epoch 4."


def test_another_fingerprint_is_refused(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet(fingerprint="0" * 64)
        assert rank.failure().startswith("The scheduler expects another model, dtype, --tp or")


# Steps


def test_plans_become_results(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        frames = [rank.send(PREFILL), rank.send(DECODE)]  # two unanswered
        results = [rank.result(), rank.result()]
        digest = 0
        for result, step_id, token, frame in zip(
            results, [1, 2], [FIRST, SECOND], frames, strict=True
        ):
            digest = zlib.crc32(pack_int32([token]), zlib.crc32(frame, digest))
            assert comparable(result) == StepResult(
                epoch=7,
                step_id=step_id,
                digest=digest,
                tokens=pack_int32([token]),
                counts=pack_int32([1]),
            )


def test_rule_6_ranks_agree_by_digest_and_only_rank_0_reports(run_dir: Path) -> None:
    with (
        RankDriver(run_dir, "--tp", "2", rank=0) as first,
        RankDriver(run_dir, "--tp", "2", rank=1) as second,
    ):
        assert first.greet().fingerprint == second.greet().fingerprint
        for plan in (PREFILL, DECODE):
            first.send(plan)
            second.send(plan)
            zero, one = first.result(), second.result()
            assert zero.digest == one.digest
            assert unpack_int32(zero.counts) == [1]
            assert (one.tokens, one.counts, one.logprobs) == (b"", b"", None)
        first.send(make_plan(3, decode=[0]))
        second.send(make_plan(3, decode=None))  # the same rows, but not the same plan
        assert first.result().digest != second.result().digest


def test_a_plan_sent_again_gets_its_stored_result(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.send(PREFILL)
        rank.send(DECODE)
        results = [comparable(rank.result()), comparable(rank.result())]
        rank.send(PREFILL)
        rank.send(DECODE)
        assert [comparable(rank.result()), comparable(rank.result())] == results
        rank.send(make_plan(3, decode=None))
        assert rank.result().step_id == 3


def test_a_frame_that_comes_twice_runs_once(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        frame = rank.send(PREFILL)
        rank.dealer.send(frame)
        rank.send(DECODE)
        assert [rank.result().step_id, rank.result().step_id] == [1, 2]


def test_a_lost_frame_is_asked_for(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.outgoing.frame(PREFILL)  # numbered and kept, but lost
        rank.send(DECODE)
        assert [rank.result().step_id, rank.result().step_id] == [1, 2]


def test_an_idle_rank_pings_so_that_a_lost_last_result_is_noticed(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.send(PREFILL)
        assert rank.result().seq == 1
        assert rank.receive(Ping).seq == 1


def test_a_failed_row_is_reported_with_its_code(run_dir: Path) -> None:
    with RankDriver(run_dir, "--fault-memory-step", "2") as rank:
        rank.greet()
        rank.send(PREFILL)
        rank.send(DECODE)
        rank.result()
        failed = rank.result()
        assert (failed.tokens, unpack_int32(failed.counts)) == (b"", [-1])
        assert unpack_int32(failed.failures) == [ErrorCode.OUT_OF_MEMORY]


def test_heartbeats_carry_the_step(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.send(PREFILL)
        rank.result()
        rank.wait_for(lambda: Heartbeat(step_id=1) in rank.reports())


# Ends


@pytest.mark.parametrize("step_id", [3, 0])
def test_a_gap_in_step_ids_is_fatal(run_dir: Path, step_id: int) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.send(PREFILL)
        rank.send(make_plan(step_id, decode=[0]))
        assert rank.failure() == (
            f"Plan of step {step_id} came; this rank can run step 2 or repeat the results of 1 "
            "to 1."
        )


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa8StepPlan\x07\x01", b"\x90" * 100])
def test_a_malformed_frame_is_fatal(run_dir: Path, frame: bytes) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.dealer.send(frame)
        assert rank.failure().startswith(f"A frame of {len(frame)} bytes is no message: ")


def test_a_plan_that_does_not_fit_is_fatal(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.send(make_plan(1, decode=[0]))
        assert rank.failure() == "step 1: slot 0 decodes but is free"


def test_a_scheduler_that_restarts_is_fatal_once_steps_have_run(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.connection.hello(Hello(role=Role.SCHEDULER, identity=b"test", epoch=7))
        rank.send(PREFILL)
        rank.result()
        rank.connection.hello(Hello(role=Role.SCHEDULER, identity=b"next", epoch=7))
        assert rank.failure().startswith("The scheduler has restarted")


def test_a_reset_is_fatal(run_dir: Path) -> None:
    with RankDriver(run_dir) as rank:
        rank.greet()
        rank.connection.send(Reset())
        assert rank.failure() == "The scheduler has lost track of this rank."


def test_out_of_memory_ends_a_group_of_ranks(run_dir: Path) -> None:
    with RankDriver(run_dir, "--tp", "2", "--fault-memory-step", "1") as rank:
        rank.greet()
        rank.send(PREFILL)
        assert rank.failure() == "Step 1 ran out of memory."


def test_a_crash_is_a_crash(run_dir: Path) -> None:
    with RankDriver(run_dir, "--fault-crash-step", "1") as rank:
        rank.greet()
        rank.send(PREFILL)
        assert rank.exit_code() == -9


def test_a_hang_ends_heartbeats_and_its_stack_can_be_seen(run_dir: Path) -> None:
    with RankDriver(run_dir, "--fault-hang-step", "1") as rank:
        rank.greet()
        rank.wait_ready()
        rank.send(PREFILL)

        def is_seen_hanging() -> bool:
            rank.dump_stacks()
            return "in before_step" in rank.log()

        rank.wait_for(is_seen_hanging)
        rank.reports()
        time.sleep(2 * HEARTBEAT_INTERVAL_S)
        assert rank.reports() == []
        rank.process.kill()


# By hand


def run_worker(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "the following arguments are required: --run-dir"),
        (("--run-dir", "x"), "--model is required without --fake-workers"),
        (
            ("--run-dir", "x", "--fake-workers", "--tp", "2", "--rank", "2"),
            "--rank 2 must be 0 to 1 with --tp 2",
        ),
        (
            ("--run-dir", "x", "--model", "m", "--fault-hang-step", "1"),
            "--fault-… flags need --fake-workers",
        ),
    ],
)
def test_wrong_flags_are_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    ended = run_worker(*flags)
    assert ended.returncode == 2
    assert ended.stderr == f"python -m worker: {sentence} (see python -m worker --help)\n"


def test_fake_workers_load_no_torch() -> None:
    code = (
        "import sys, worker.__main__\n"
        "from protocol.lifecycle import ProcessConfig\n"
        "from worker.back_ends import build_runner\n"
        "from worker.config import WorkerConfig\n"
        "build_runner(WorkerConfig(process=ProcessConfig(run_dir='x'), fake_workers=True))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=20, check=True)
