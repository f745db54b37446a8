"""Who may use a link, and what becomes of notes that are left meanwhile."""

import threading

import pytest

from frontend.client.errors import ClientUseError
from frontend.client.link import Link
from protocol.messages import Abort, Generate, SamplingParams


@pytest.fixture
def link(endpoint):
    endpoint.on_generate = endpoint.hold
    link = Link(endpoint.address, window=4, silence_limit_s=5.0)
    link.greet(5.0)
    yield link
    link.close()


def submit(link):
    with link.session() as session:
        generate = Generate(request_id=0, prompt="x", params=SamplingParams())
        return session.submit(generate, lambda _: None)


def in_thread(call):
    errors = []

    def run():
        try:
            call()
        except ClientUseError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_one_thread_at_a_time(link):
    def enter():
        with link.reserved():
            pass

    with link.reserved():
        enter()
        assert len(in_thread(enter)) == 1
        assert len(in_thread(lambda: link.status(1.0))) == 1
        assert len(in_thread(link.close)) == 1
    assert in_thread(enter) == []


def test_a_note_is_read_at_once_where_the_link_is_free(endpoint, link):
    number = submit(link)
    link.leave(number)
    endpoint.take(Generate)
    assert endpoint.take(Abort)[0].request_id == number


def test_a_note_left_in_the_middle_of_something_is_read_after_it(endpoint, link):
    number = submit(link)
    endpoint.take(Generate)
    with link.session() as session:
        link.leave(number)  # as a finalizer does that runs now
        assert session.live_request_ids == [number]
    assert session.live_request_ids == []
    assert endpoint.take(Abort)[0].request_id == number


def test_a_note_left_by_another_thread_is_read_by_who_has_the_link(endpoint, link):
    number = submit(link)
    endpoint.take(Generate)
    with link.session() as session:
        assert in_thread(lambda: link.leave(number)) == []
        assert session.live_request_ids == [number]
    assert endpoint.take(Abort)[0].request_id == number


def test_a_note_after_the_end_is_harmless(link):
    number = submit(link)
    link.close()
    link.leave(number)
