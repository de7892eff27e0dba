"""The run configuration: what is accepted, and what an error says."""

from pathlib import Path

import pytest

from megatron_sao.config import ConfigError, dump_config, load_config, parse_config
from tools.study.run import load_study

ROOT = Path(__file__).parents[2]
MINIMAL = {
    "name": "a-run",
    "model": {"path": "models/tiny"},
    "data": {"train": "data/train.jsonl"},
    "rollout": {"environment": "package.module:Environment"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(parse_config(MINIMAL)))
    return path


def test_a_dumped_config_loads_to_an_equal_one(path):
    assert load_config(path) == parse_config(MINIMAL)


def test_the_papers_settings_are_the_defaults():
    algorithm = parse_config(MINIMAL).algorithm
    assert (algorithm.eps_low, algorithm.eps_high, algorithm.critic_updates, algorithm.lambda_alpha) == (
        0.3,
        5.0,
        2,
        1.5,
    )


def test_overrides_are_yaml_values_and_reach_any_depth(path):
    overrides = [
        "rl.policy_optimizer.lr=3e-4",
        "engine.sglang.mem_fraction_static=0.2",
        "value.steps=7",
        "eval.every=0",
    ]
    config = load_config(path, overrides)
    assert config.rl.policy_optimizer.lr == 3e-4
    assert config.engine.sglang == {"mem_fraction_static": 0.2}
    assert config.value.steps == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.batchsize=3", "unknown key 'rl.batchsize'; the nearest known key is 'rl.batch_size'"),
        ("rll.steps=3", "unknown key 'rll'; the nearest known key is 'rl'"),
        ("rl.policy_optimizer.learning_rate=1", "unknown key 'rl.policy_optimizer.learning_rate'"),
        ("rl.batch_size=many", "'rl.batch_size' = 'many'"),
        ("rl.batch_size=0", "'rl.batch_size' = 0"),
        ("name=a run", "'name' = 'a run'"),
        ("rl.steps", "expected section.field=value"),
        ("name.first=a", "'name' is a value, not a section"),
        ("rl.steps=[", "the value is not valid YAML"),
        ("rollout.sampling.top_p=0.9", "top_p=0.9 without top_k"),
        ("rollout.sampling.top_k=1", "greedy sampling has log-probability 0"),
        ("parallel={tp: 2, world_size: 3}", "world_size=3 is not a multiple of tp·pp·cp=2"),
        ("rl={sync_interval: 4, max_staleness: 1}", "raise max_staleness to sync_interval - 1"),
        ("parallel={vpp: 2}", "vpp=2 needs pipeline parallelism"),
        ("parallel.offload_optimizer=true", "parallel.offload_optimizer = true with model.dtype = float32"),
        ("parallel={ep: 4, world_size: 2}", "world_size=2 is not a multiple of etp·ep·pp=4"),
        ("algorithm.advantage=group", "rl.group_size = 1 with algorithm.advantage = 'group'"),
        ("rl={group_size: 4, batch_size: 8}", "rl.group_size = 4 with algorithm.advantage = 'critic'"),
        ("rl={minibatches: 3, batch_size: 8}", "not a multiple of rl.minibatches = 3"),
        ("algorithm={advantage: running_mean, truncation: bootstrap}", "set it to terminal"),
        ("algorithm={policy_loss: ppo_clip, loss_denominator: accepted_tokens}", "use action_tokens or trajectories"),
        ("algorithm.pi_old=rollout", "algorithm.pi_old = rollout with algorithm.policy_loss = dis"),
        ("algorithm.critic_trainable=[]", "'algorithm.critic_trainable' = []: no parameter of the critic would train"),
        ("algorithm.critic_trainable=['mlp', '(']", "'(' is not a regular expression (missing ), unterminated"),
        (
            "rollout.sampling.top_k=5000",
            "rollout.sampling.top_k = 5000, but the engines report supports of at most 4096",
        ),
        ("engine.sglang.sampling_mask_max_tokens=many", "engine.sglang.sampling_mask_max_tokens = 'many'"),
    ],
)
def test_an_error_names_the_field_the_value_and_the_remedy(path, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert message in str(error.value)
    assert f"--set {override}" in str(error.value) or f"--set {override!r}" in str(error.value)


def test_engines_that_report_larger_supports_allow_a_larger_top_k(path):
    overrides = ["rollout.sampling.top_k=5000", "engine.sglang.sampling_mask_max_tokens=5000"]
    assert load_config(path, overrides).rollout.sampling.top_k == 5000


def test_the_distributed_optimizer_is_refused_for_sgd(path):
    overrides = ["parallel.distributed_optimizer=true", "value.optimizer.name=sgd"]
    with pytest.raises(ConfigError, match=r"distributed_optimizer = true with value\.optimizer\.name = sgd.*adam"):
        load_config(path, overrides)


def test_a_model_without_another_beside_it_does_not_make_way(path):
    overrides = ["value.steps=0", "algorithm.advantage=running_mean", "algorithm.truncation=terminal"]
    with pytest.raises(ConfigError, match=r"offload_idle_model = true with algorithm\.advantage = 'running_mean'"):
        load_config(path, [*overrides, "parallel.offload_idle_model=true"])
    load_config(path, overrides)


@pytest.mark.parametrize("study", ["study.yaml", "tuning.yaml"])
def test_the_projects_own_configs_and_every_method_of_the_study_are_valid(study):
    for config in (ROOT / "model_configs").glob("*.yaml"):
        load_config(config)
    runs = load_study(ROOT / "tools" / "study" / study)
    assert runs
    for run in runs:
        load_config(ROOT / run.config, list(run.overrides))


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="'model' is required and missing"):
        parse_config({key: value for key, value in MINIMAL.items() if key != "model"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must hold a mapping of sections, not list"),
        ("a: [", "is not valid YAML"),
        (None, "cannot read the config"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_a_config_cannot_be_changed_after_it_was_checked(path):
    config = load_config(path)
    with pytest.raises(ValueError, match="frozen"):
        config.rl.steps = 3
