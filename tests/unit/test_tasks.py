import json

import pytest

from megatron_sao.data.tasks import Task, TaskError, epoch_order, load_tasks


def write(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


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
    ],
)
def test_an_unusable_line_is_named_by_file_and_number(tmp_path, records, message):
    with pytest.raises(TaskError, match=message):
        load_tasks(write(tmp_path / "t.jsonl", *records))


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"cannot read the tasks in .*absent.jsonl"):
        load_tasks(tmp_path / "absent.jsonl")


def test_every_epoch_is_another_permutation_that_depends_on_seed_and_epoch_alone():
    orders = {(seed, epoch): tuple(epoch_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(epoch_order(50, 1, 1))
