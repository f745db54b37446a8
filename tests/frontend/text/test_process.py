"""The text process itself, joined to a bare socket."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from frontend.text.config import TextConfig
from frontend.text_child import TextChild
from protocol.columns import unpack_int32
from protocol.errors import ModelFileError
from protocol.lifecycle import ProcessConfig
from protocol.messages import ChatMessage, Hello, Role, TextDone, TextJob, TextKind

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(gguf_file, tokenizer_cache, smol, tmp_path):
    return TextConfig(
        process=ProcessConfig(run_dir=str(tmp_path), epoch=4),
        address=f"ipc://{tmp_path}/text-0.0",
        model=str(gguf_file),
        tokenizer_cache=str(tokenizer_cache),
    )


def with_child(config, use):
    """Run a text process, wait for its Hello, use it."""

    async def main():
        context = zmq.asyncio.Context()
        child = TextChild(context, config, None)
        try:
            async with asyncio.timeout(20):
                hello = await child.receive()
                return await use(child, hello)
        finally:
            child.close()
            context.destroy(linger=0)

    return asyncio.run(main())


def test_it_says_hello_and_does_jobs_in_order(config):
    async def use(child, hello):
        assert isinstance(hello, Hello)
        assert (hello.role, hello.epoch) == (Role.TEXT, 4)
        chat = [ChatMessage(role="user", content="hello")]
        child.send(TextJob(job_id=1, kind=TextKind.TOKENIZE, payload="hello"))
        child.send(TextJob(job_id=2, kind=TextKind.RENDER, payload=chat))
        child.send(TextJob(job_id=3, kind=TextKind.COMPILE, payload=""))
        return [await child.receive() for _ in range(3)]

    first, second, third = with_child(config, use)
    assert unpack_int32(first.token_ids) == [28120]
    assert second.text.endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert third == TextDone(epoch=4, seq=3, job_id=3, error="Grammars are not supported.")


def test_with_a_warm_cache_it_is_light_and_fast(config):
    async def use(child, hello):
        process = psutil.Process(child.pid)
        libraries = {Path(region.path).name for region in process.memory_maps()}
        return process.memory_info().rss, libraries

    started = time.monotonic()
    memory, libraries = with_child(config, use)
    assert time.monotonic() - started < 5
    assert not any("torch" in name for name in libraries)
    assert memory < 250 << 20


def test_it_imports_neither_transformers_nor_torch():
    code = "import sys, frontend.text.process; print('transformers' in sys.modules, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert modules[0] == "False"
    assert not {"torch", "gguf", "numpy", "starlette"} & set(modules)


def test_a_model_that_is_not_there_ends_it_with_a_sentence(config, tmp_path):
    import dataclasses

    async def main():
        context = zmq.asyncio.Context()
        missing = dataclasses.replace(config, model=str(tmp_path / "nothing"))
        child = TextChild(context, missing, None)
        try:
            await asyncio.wait_for(child.ended, 20)
        finally:
            how = child.close()
            context.destroy(linger=0)
        return child.failure, how

    failure, how = asyncio.run(main())
    assert failure.exit_code == 2
    assert "--model: there is no file or directory" in failure.sentence
    assert "exited with 2" in how


def test_it_ends_with_its_lifeline(config):
    async def use(child, hello):
        child._child.cut_lifeline()
        await asyncio.wait_for(child.ended, 5)
        return child._child.process.wait()

    assert with_child(config, use) == 0


@pytest.mark.slow
def test_a_cold_cache_is_filled_and_the_process_starts_anew(config, tmp_path, smol):
    import dataclasses

    cold = dataclasses.replace(config, tokenizer_cache=str(tmp_path / "cold"))

    async def use(child, hello):
        process = psutil.Process(child.pid)
        command = process.cmdline()
        child.send(TextJob(job_id=1, kind=TextKind.TOKENIZE, payload="hello"))
        return command, await child.receive(), process.memory_info().rss

    async def main():
        context = zmq.asyncio.Context()
        child = TextChild(context, cold, None)
        try:
            async with asyncio.timeout(60):
                hello = await child.receive()
                return await use(child, hello)
        finally:
            child.close()
            context.destroy(linger=0)

    command, done, memory = asyncio.run(main())
    assert "--converted" in command
    assert unpack_int32(done.token_ids) == [28120]
    assert memory < 250 << 20
    files = sorted(path.name for path in (tmp_path / "cold").rglob("*.json"))
    assert files == ["model.json", "tokenizer.json"]


def test_a_conversion_that_does_not_take_is_not_tried_for_ever(config, tmp_path):
    import dataclasses

    from frontend.text.process import run
    from protocol.lifecycle import Lifeline

    again = dataclasses.replace(config, tokenizer_cache=str(tmp_path / "cold"), converted=True)
    with pytest.raises(ModelFileError, match="cannot be written or read"):
        run(again, Lifeline(again.process))
