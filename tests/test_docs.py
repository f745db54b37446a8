"""What the pages say of the code, where a machine can compare the two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.http.errors import ANSWERS, ending_to_http
from frontend.http.openapi import OPERATIONS
from frontend.http.schemas import ONE_VALUE, ChatRequest, CompletionRequest, StreamOptions
from launch import LaunchConfig, main
from protocol.messages import FinishReason
from protocol.recording import recorder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HTTP = (ROOT / "docs" / "http.md").read_text()


def relative(path):
    return str(path.relative_to(ROOT))


def table(text, heading):
    """Return the rows of the first table after a heading, as lists of cells."""
    rows = text[text.index(heading) :].split("\n|", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows.split("\n")][2:]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
            assert anchor in anchors, target


def test_every_page_of_the_docs_is_linked_from_the_architecture_page():
    text = (ROOT / "docs" / "architecture.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"architecture.md"}
    assert {name for name in pages if f"({name})" not in text} == set()


def test_the_readme_names_every_flag_of_the_launcher(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(flags) == len(LaunchConfig.__dataclass_fields__)
    rows = table((ROOT / "README.md").read_text(), "## Serve another model")
    named = [flag for row in rows for flag in re.findall(r"--[a-z-]+", row[0])]
    assert len(named) == len(set(named))
    # Not for people: a program that starts the launcher gives it.
    assert set(named) == flags - {"--lifeline-fd"}


def test_the_http_page_names_every_endpoint():
    rows = [(row[0].lower(), row[1].strip("`")) for row in table(HTTP, "# The HTTP API")]
    routes = [(operation.method, operation.path) for operation in OPERATIONS]
    assert sorted(rows) == sorted([*routes, ("get", "/openapi.json")])


def test_the_http_page_names_every_field():
    named = {row[0].strip("`") for row in table(HTTP, "## Fields")}
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert named == fields
    nested = (*StreamOptions.__struct_fields__, *ONE_VALUE)
    assert [name for name in nested if f"`{name}`" not in HTTP and f'`"{name}' not in HTTP] == []


def test_the_http_page_names_every_error():
    rows = table(HTTP, "## Errors")
    named = {
        (status, code)
        for row in rows
        for status in row[0].split(", ")
        for code in row[1].split(", ")
    }
    for answer in ANSWERS.values():
        assert (str(answer.status), f"`{answer.code}`") in named
    for reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
        error = ending_to_http(reason)
        assert (str(error.status), f"`{error.detail.code}`") in named


def test_the_command_that_shows_a_recording_shows_it(tmp_path):
    tap = recorder(str(tmp_path), "worker-0")
    assert tap is not None
    tap.record("out", "ipc:///run/rank-0", b"", b"\x93\xa4Ping\x01\x02")
    tap.close()
    text = (ROOT / "docs" / "debugging.md").read_text()
    (program,) = re.findall(r'-c "\n(.*?)" taps/worker-0\.tap', text, re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            re.sub("^    ", "", program, flags=re.MULTILINE),
            tmp_path / "worker-0.tap",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert re.fullmatch(r"\d+\.\d{6} out rank-0  \['Ping', 1, 2\]\n", done.stdout)
