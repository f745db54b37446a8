"""What a text child adds to a child process: a numbered connection, and a clean end."""

import asyncio
import os
import signal

import psutil
import pytest
import zmq.asyncio

from frontend.text.config import TextConfig
from frontend.text_child import TextChild
from protocol.lifecycle import ProcessConfig


@pytest.fixture
def config(gguf_file, tokenizer_cache, smol, tmp_path):
    return TextConfig(
        process=ProcessConfig(run_dir=str(tmp_path)),
        address=f"ipc://{tmp_path}/text-0.0",
        model=str(gguf_file),
        tokenizer_cache=str(tokenizer_cache),
    )


@pytest.mark.parametrize("end", ["kill", "SIGKILL from outside"])
def test_its_end_is_noticed_and_nothing_is_left(config, end, tmp_path):
    async def main():
        context = zmq.asyncio.Context()
        child = TextChild(context, config, None)
        descriptors = psutil.Process().num_fds()
        async with asyncio.timeout(20):
            await child.receive()
            if end == "kill":
                child.kill()
            else:
                os.kill(child.pid, signal.SIGKILL)
            await child.ended
        how = child.close()
        context.destroy(linger=0)
        return child.pid, how, descriptors

    pid, how, descriptors = asyncio.run(main())
    assert f"text (pid {pid}) was killed by SIGKILL" in how
    assert not psutil.pid_exists(pid)
    assert psutil.Process().num_fds() < descriptors
    assert list(tmp_path.glob("text-*")) == []


def test_a_running_child_can_be_closed(config):
    async def main():
        context = zmq.asyncio.Context()
        child = TextChild(context, config, None)
        pid = child.pid
        child.close()
        context.destroy(linger=0)
        return pid

    assert not psutil.pid_exists(asyncio.run(main()))
