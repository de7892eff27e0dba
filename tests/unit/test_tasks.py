import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.buffer.server import Service, create_app
from megatron_sao.data.tasks import MAX_DEPTH, Task, TaskError, epoch_order, load_tasks
from tests.store_bench import Bench

TOKEN = "the-token-of-the-tests"
ANY_TEXT = st.text(st.characters())  # halves of surrogate pairs too
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)


def write(path, *records):
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    return path


def nested(depth):
    return "[" * depth + "]" * depth


def leased(directory, tasks):
    """The tasks as a worker gets them from the buffer over HTTP."""

    async def run():
        service = Service(bench.store, bench.config, vocab_size=7)
        transport = httpx.ASGITransport(create_app(service, TOKEN))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://buffer", headers=headers) as http:
            body = {"worker_id": "w", "request_id": "r", "max_leases": len(tasks)}
            answer = (await http.post("/v1/tasks/lease", json=body)).raise_for_status()
        await service.close()
        return [Task(**lease["task"]) for lease in answer.json()["leases"]]

    bench = Bench(directory, tasks=tasks)
    bench.train()
    return asyncio.run(run())


def test_a_task_keeps_prompt_label_and_free_fields(tmp_path):
    messages = [{"role": "user", "content": "1+1=?"}]
    first = {"id": 7, "prompt": "1+1=", "label": 2, "level": "easy"}
    path = write(tmp_path / "t.jsonl", first, "", {"prompt": messages})
    first, second = load_tasks(path)
    assert first == Task(id="7", prompt="1+1=", label=2, extra={"level": "easy"})
    assert (second.prompt, second.label, second.extra) == (messages, None, {})


def test_a_missing_id_depends_on_the_content_alone(tmp_path):
    one = load_tasks(write(tmp_path / "1.jsonl", {"prompt": "a", "label": 1}, {"prompt": "b"}))
    two = load_tasks(write(tmp_path / "2.jsonl", {"prompt": "b"}, {"label": 1, "prompt": "a"}))
    assert one[0].id == two[1].id
    assert one[0].id != one[1].id


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "a"}, "{"], r"t.jsonl:2: not valid JSON"),
        (["[1]"], r"t.jsonl:1: expected a JSON object, found list"),
        ([{"label": 1}], r"t.jsonl:1: 'prompt' must be"),
        ([{"prompt": [{"content": "x"}]}], r"t.jsonl:1: 'prompt' must be"),
        ([{"prompt": "a", "id": 1.5}], r"t.jsonl:1: 'id' must be"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], r"t.jsonl:2: the id 'x' is also on line 1"),
        ([{"prompt": "a"}, {"prompt": "a"}], r"t.jsonl:2: the id .* is also on line 1"),
        ([""], r"t.jsonl holds no task"),
        ([{"prompt": "a"}, '{"prompt": "\udcff"}'], r"t.jsonl:2: not valid JSON in UTF-8: .* byte 0xff"),
        ([{"prompt": "a", "id": 10**1024}], r"t.jsonl:1: 'id' has 1025 characters, and the limit is 1024"),
        ([{"prompt": "\ud83d"}], r"t.jsonl:1: holds '\\ud83d', one half of a character"),
        ([{"prompt": "a", "id": "\udc00"}], r"t.jsonl:1: holds '\\udc00', one half of a character"),
        ([{"prompt": "a", "\ud83d": 1}], r"t.jsonl:1: holds '\\ud83d', one half of a character"),
        ([{"prompt": "a", "id": "x", "label": ["\ud83d"]}], r"t.jsonl:1: holds '\\ud83d', one half of a character"),
        (['{"prompt": "a", "label": NaN}'], r"t.jsonl:1: holds NaN, .*write null, or text"),
        (['{"prompt": "a", "x": [-Infinity]}'], r"t.jsonl:1: holds NaN, an infinity"),
        (['{"prompt": "a", "label": 1e999}'], r"t.jsonl:1: holds .* a number too large for a float"),
        ([f'{{"prompt": "a", "label": {nested(MAX_DEPTH)}}}'], r"t.jsonl:1: more than 100 lists and objects"),
        ([f'{{"prompt": "a", "label": {nested(900)}}}'], r"t.jsonl:1: more than 100 lists and objects"),
        ([f'{{"prompt": "a", "label": {nested(100_000)}}}'], r"t.jsonl:1: more than 100 lists and objects"),
    ],
)
def test_an_unusable_line_is_named_by_file_and_number(tmp_path, records, message):
    with pytest.raises(TaskError, match=message):
        load_tasks(write(tmp_path / "t.jsonl", *records))


@given(st.fixed_dictionaries({"prompt": ANY_TEXT, "label": ANY_VALUE}, optional={"id": ANY_TEXT, "x": ANY_VALUE}))
@settings(max_examples=50)
def test_a_task_is_refused_or_comes_out_of_a_lease_as_it_went_in(record):
    with TemporaryDirectory() as directory:
        try:
            tasks = load_tasks(write(Path(directory) / "t.jsonl", record))
        except TaskError:
            return
        assert leased(Path(directory), tasks) == tasks
        assert (tasks[0].prompt, tasks[0].label) == (record["prompt"], record["label"])


@pytest.mark.parametrize(
    "fields",
    [
        {"label": json.loads(nested(MAX_DEPTH - 1))},
        {"prompt": [{"role": "user", "content": json.loads(nested(MAX_DEPTH - 3))}]},
        {"prompt": "[{" * MAX_DEPTH},
        {"label": [10**4299, 5e-324, -1.7976931348623157e308, 1.0]},
        {"id": "\0\n" * 512},
        {"id": ".."},
    ],
)
def test_a_task_at_the_edge_of_what_is_allowed_comes_out_of_a_lease_as_it_went_in(tmp_path, fields):
    record = {"id": "a", "prompt": "a", "label": None} | fields
    tasks = load_tasks(write(tmp_path / "t.jsonl", record))
    assert leased(tmp_path, tasks) == tasks == [Task(**record, extra={})]


def test_a_byte_order_mark_is_no_part_of_the_first_task(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8-sig")
    assert [task.prompt for task in load_tasks(tmp_path / "t.jsonl")] == ["a", "b"]


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"cannot read the tasks in .*absent.jsonl"):
        load_tasks(tmp_path / "absent.jsonl")


def test_every_epoch_is_another_permutation_that_depends_on_seed_and_epoch_alone():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(epoch_order(50, 1, 1))
