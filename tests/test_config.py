"""Config files, overrides, messages, provenance, round trips and what may change at a resume."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxllm import config as config_module
from jaxllm.config import Config, check, describe, differences, dump, json_schema, load_config, resolve_model_path
from jaxllm.data import DataConfig
from jaxllm.plan import parse_devices
from jaxllm.section import UserError
from support import MIXTRAL, ROOT

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "initializer_range": 0.02,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": [2, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def llama_folder(write):
    return write("llama/config.json", json.dumps(LLAMA)).parent


def refusal(*overrides, path=None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, *overrides)
    return str(caught.value)


# --- reading


def test_defaults_file_extends_and_command_line_win_in_that_order(write):
    write("base.toml", 'seed = 1\nsteps = 20\n[optimizer]\nlearning_rate = 1e-2\nschedule = "linear"\n')
    path = write("run.toml", 'extends = "base.toml"\nsteps = 30\n[optimizer]\nlearning_rate = 2e-2\n')
    config = load_config(path, "optimizer.learning_rate=3e-2", "mesh.data=2")
    assert (config.seed, config.steps, config.mesh.data) == (1, 30, 2)
    assert (config.optimizer.schedule, config.optimizer.learning_rate) == ("linear", 3e-2)
    assert config.optimizer.eps == Config().optimizer.eps


def test_override_values_are_toml_and_bare_words_are_strings():
    config = load_config(
        None, "output_dir=/some/where with space", "data.path=a/*.py", "data.exclude=['x', \"y\"]",
        "data.shuffle=false",
        "optimizer.weight_decay=0", "optimizer.betas=[0.8, 0.9]", "data.kind=text",
    )  # fmt: skip
    assert config.output_dir == "/some/where with space" and config.data.path == "a/*.py"
    assert config.data.exclude == ["x", "y"] and config.data.shuffle is False
    assert config.optimizer.weight_decay == 0 and config.optimizer.betas == [0.8, 0.9]


def test_an_override_inside_a_table_keeps_its_other_entries(write):
    path = write(
        "rope.toml",
        "[model.rope_parameters]\nrope_type = 'linear'\nrope_theta = 5e5\nfactor = 2.0\n",
    )
    rope = load_config(path, "model.rope_parameters.factor=4.0").model.rope_parameters
    assert rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    assert load_config(path).model.rope_parameters["factor"] == 2.0


def test_extends_is_relative_to_its_file_and_goes_one_level(write):
    write("a/base.toml", "steps = 7")
    assert load_config(write("b/run.toml", 'extends = "../a/base.toml"')).steps == 7
    write("first.toml", "steps = 1")
    write("second.toml", 'extends = "first.toml"')
    message = refusal(path=write("third.toml", 'extends = "second.toml"'))
    assert "second.toml" in message and "only one level" in message
    message = refusal(path=write("lost.toml", 'extends = "secnd.toml"'))
    assert "secnd.toml: no such config file" in message and "lost.toml extends" in message and "second.toml" in message


def test_a_file_that_is_missing_or_no_toml_is_refused_with_its_name(write, tmp_path):
    write("quickstart.toml", "")
    assert "quickstart.toml" in refusal(path=tmp_path / "quickstrat.toml")
    message = refusal(path=write("broken.toml", "steps = 3\nsteps =\n"))
    assert "broken.toml" in message and "line 2" in message
    assert "cannot be read" in refusal(path=tmp_path)


# --- messages


def test_a_misspelt_key_is_refused_with_path_place_value_and_the_right_name(write):
    path = write("typo.toml", "# comment\nsteps = 5\n\n[optimizer]\nlearnig_rate = 1e-5\n")
    message = refusal(path=path)
    assert "optimizer.learnig_rate: no such key, got 1e-05" in message
    assert f"{path}:5" in message and "did you mean optimizer.learning_rate?" in message
    message = refusal("learnig_rate=1e-5")
    assert "command line" in message and "optimizer.learning_rate" in message
    assert "optimizer.learning_rate" in refusal("optimzer.learning_rate=1e-5")
    assert "optimizer" in refusal(path=write("section.toml", "[optimzer]\n"))


def test_a_right_key_in_the_wrong_section_is_sent_to_its_section(write):
    path = write("misplaced.toml", "[data]\nlearning_rate = 1e-3\nsteps = 3\n")
    message = refusal(path=path)
    assert "data.learning_rate" in message and "it belongs in optimizer: optimizer.learning_rate" in message
    assert "data.steps" in message and "it belongs in no section: steps" in message


def test_a_key_like_no_other_is_answered_with_what_there_is():
    message = refusal("zzz=1")
    assert "output_dir" in message and "optimizer" in message
    assert "replica" in refusal("mesh.zzz=1") and "learning_rate" not in refusal("mesh.zzz=1")


@pytest.mark.parametrize(
    "override, words",
    [
        ("steps=ten", ["steps: must be a valid integer", "'ten'"]),
        ("data.seq_len=128.5", ["data.seq_len", "integer", "128.5"]),
        ("steps=true", ["steps", "integer", "true"]),
        ("model.tie_word_embeddings='false'", ["model.tie_word_embeddings", "boolean", "'false'"]),
        ("optimizer.learning_rate='1e-3'", ["optimizer.learning_rate", "number", "'1e-3'"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate", "finite"]),
        ("optimizer.learning_rate.x=1", ["optimizer.learning_rate", "number"]),
        ("optimizer.kind=adam", ["optimizer.kind", "'adamw' or 'sgd'", "'adam'"]),
        ("output_dir=3", ["output_dir", "string", "quote it: '\"3\"'"]),
        ("optimizer.betas=[0.9", ["optimizer.betas", "list", "[0.9"]),
        ("model=3", ["model: is a section", "model.<key>"]),
        ("steps=0", ["steps", "greater than or equal to 1", "got 0"]),
        ("--steps=3", ["--steps=3", "section.field=value"]),
        ("steps", ["steps", "section.field=value"]),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_got(override, words):
    message = refusal(override)
    assert all(word in message for word in words), message
    assert "pydantic" not in message


def test_all_problems_of_a_load_come_in_one_message(write):
    path = write("many.toml", "steps = 'ten'\n[optimizer]\nbetas = [0.9]\nlerning_rate = 1\n[mesh]\ndata = 1.5\n")
    message = refusal("data.seqlen=3", path=path)
    assert message.startswith("5 problems")
    for words in ("steps", "optimizer.betas", "optimizer.lerning_rate", "mesh.data", "data.seqlen"):
        assert words in message
    for line in (1, 4, 6):
        assert f"many.toml:{line}" in message


# --- cross-checks


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["data.global_batch_size=6", "mesh.data=4"], ["6", "mesh.data 4", "= 4", "4 or 8"]),
        (["data.global_batch_size=8", "optimizer.num_microbatches=3"], ["8", "num_microbatches 3", "6 or 9"]),
        (
            ["data.global_batch_size=8", "mesh.replica=2", "mesh.data=4", "optimizer.num_microbatches=2"],
            ["mesh.replica 2", "mesh.data 4", "num_microbatches 2", "= 16", "nearest: 16"],
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_numbers_and_the_nearest(overrides, words):
    message = refusal(*overrides)
    assert message.startswith("data.global_batch_size") and all(word in message for word in words), message


def test_a_mesh_that_does_not_fit_the_devices_is_refused_once_they_are_known():
    config = load_config(None, "mesh.data=4", "mesh.replica=4", "data.global_batch_size=16")
    with pytest.raises(UserError, match=r"(?s)mesh.*\b16\b.*\b8\b.*mesh\.data"):
        check(config, num_devices=8)
    check(config, num_devices=16)
    filled = load_config(None, "data.global_batch_size=12")  # mesh.data = -1 becomes 8, which does not divide 12
    check(filled, num_devices=4)
    with pytest.raises(UserError, match=r"12 must be a multiple of .*mesh.data 8.*8 or 16"):
        check(filled, num_devices=8)


SCALED = {  # rope_parameters beside max_position_embeddings = 4096, and the longest row that they are meant for
    "default": ("{rope_type='default', rope_theta=1e4}", 4096),
    "linear": ("{rope_type='linear', rope_theta=1e4, factor=4.0}", 16384),
    "dynamic": ("{rope_type='dynamic', rope_theta=1e4, factor=2.0}", 8192),
    "yarn": ("{rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=4096}", 16384),
    "llama3": (
        "{rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256}",
        4096,
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_row_longer_than_the_model_is_meant_for_is_refused_unless_its_rope_is_scaled_for_it(kind, llama_folder):
    rope, longest = SCALED[kind]
    # A model from a folder and one of one's own.
    for model in ([f"model.path={llama_folder}"], ["model.max_position_embeddings=4096"]):
        asked = [*model, f"model.rope_parameters={rope}"]
        assert load_config(None, *asked, f"data.seq_len={longest}").data.seq_len == longest
        message = refusal(*asked, f"data.seq_len={longest + 1}")
        assert message.startswith(
            f"data.seq_len: {longest + 1} tokens are more than model.max_position_embeddings = 4096"
        )
        assert (f"stretched to {longest}" in message) == (longest > 4096) and "model.rope_parameters" in message


def test_a_sample_longer_than_the_model_is_meant_for_is_refused():
    asked = ["model.max_position_embeddings=64", "data.seq_len=64", "evaluation.prompt=x"]
    load_config(None, *asked, "evaluation.prompt_tokens=63")
    message = refusal(*asked, "evaluation.prompt_tokens=64")
    assert (
        message.startswith("evaluation.prompt_tokens, with a prompt of at least one: 65 tokens") and "= 64" in message
    )
    assert "lower evaluation.prompt_tokens" in message


def test_evaluation_batches_must_divide_too_when_there_is_an_evaluation():
    asked = ["mesh.data=4", "evaluation.holdout=0.1", "evaluation.batch_size=6"]
    load_config(None, *asked)
    assert "evaluation.batch_size: 6" in refusal(*asked, "evaluation.every=10")


# A value other than the usual one of every setting of [data], and the kinds that it is for; other kinds refuse it.
ALL = ("text", "chat", "prompt", "tokens")
WHOLE = ("chat", "prompt")
FOR_KINDS = {
    "kind": ("text", ALL), "path": ("x", ALL), "exclude": (["x"], ALL), "seq_len": (64, ALL), "workers": (1, ALL),
    "global_batch_size": (16, ALL), "shuffle": (False, ALL), "repeat": (False, ALL), "epochs": (2, ALL),
    "cache": ("x", ALL), "on_bad": ("skip", ALL), "tokenizer": ("x", ALL), "packing": ("none", ALL),
    "weights": ([0.5, 0.5], ALL), "text_field": ("body", ["text"]), "messages_field": ("turns", ["chat"]),
    "prompt_field": ("question", ["prompt"]), "completion_field": ("answer", ["prompt"]),
    "train_on": (["assistant"], WHOLE), "chat_template": ("x.jinja", ["chat"]), "on_long": ("skip", WHOLE),
    "add_bos": (False, ["text", *WHOLE]), "add_eos": (True, ["text", "prompt"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL)
def test_every_setting_of_the_data_is_read_by_its_kinds_and_refused_by_the_others(kind):
    assert FOR_KINDS.keys() == DataConfig.model_fields.keys()
    for name, (value, kinds) in FOR_KINDS.items():
        if name == "kind":
            continue
        overrides = [f"data.kind={kind}", f"data.{name}={json.dumps(value)}"] + ["data.path=['a', 'b']"] * (
            name == "weights"
        )
        if kind in kinds:
            assert getattr(load_config(None, *overrides).data, name) == value
        else:
            message = refusal(*overrides)
            assert message.startswith(f"data.{name} = {json.dumps(value)} would be ignored: it is for data.kind = "), (
                message
            )
            assert all(f'"{reader}"' in message for reader in kinds) and f'here it is "{kind}"' in message
    # what such a config is saved as can be read again
    config = load_config(None, f"data.kind={kind}")
    assert config_module.Config.model_validate(tomllib.loads(dump(config))) == config


def test_all_settings_that_a_kind_ignores_are_named_at_once_and_values_of_other_kinds_are_refused():
    message = refusal("data.kind=tokens", "data.add_eos=false", "data.text_field=body", "data.on_long=skip")
    assert message.startswith("3 problems") and message.count("would be ignored") == 3
    assert "data.tokenizer = " in refusal("data.kind=tokens", "data.tokenizer=bpe:4096")
    for kind in ("text", "tokens"):
        assert '"first_fit" splits nothing' in refusal(f"data.kind={kind}", "data.packing=first_fit")
    for kind in WHOLE:
        load_config(None, f"data.kind={kind}", "data.packing=first_fit")
        assert '"concatenate" would split' in refusal(f"data.kind={kind}", "data.packing=concatenate")


def test_warmup_longer_than_the_run_is_refused():
    message = refusal("steps=10", "optimizer.warmup_steps=20")
    assert "optimizer.warmup_steps: 20" in message and "steps = 10" in message


# --- models from folders


def test_a_model_folder_fills_the_model_section(llama_folder):
    config = load_config(None, f"model.path={llama_folder}", "model.remat=none")
    for field in (
        "vocab_size",
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    ):
        assert getattr(config.model, field) == LLAMA[field]
    assert config.model.rope_parameters["rope_theta"] == 500000.0
    assert config.model.remat == "none" and config.model.path == str(llama_folder)
    shown = describe(config)
    assert re.search(r"hidden_size = 64 +# from .*config\.json", shown)


def test_a_field_that_contradicts_the_folder_is_refused_with_both_values(llama_folder, write):
    message = refusal(f"model.path={llama_folder}", "model.hidden_size=128")
    assert "model.hidden_size: 128 (command line)" in message and "hidden_size = 64" in message and "shape" in message
    path = write("run.toml", f"[model]\npath = '{llama_folder}'\nvocab_size = 256\nnum_hidden_layers = 3\n")
    message = refusal(path=path)
    assert "model.num_hidden_layers: 3" in message and f"{path}:4" in message and "vocab_size" not in message
    # what makes contexts longer may be changed, one entry or all
    config = load_config(
        None, f"model.path={llama_folder}", "model.max_position_embeddings=8192", "model.rope_parameters.rope_theta=1e6"
    )
    assert config.model.max_position_embeddings == 8192
    assert config.model.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_a_folder_that_is_no_model_is_refused(tmp_path, write):
    assert "neither config.json nor config.toml" in refusal(f"model.path={tmp_path}")
    other = write("other/config.json", json.dumps({**LLAMA, "model_type": "mamba"})).parent
    assert "'mamba'" in refusal(f"model.path={other}") and "llama" in refusal(f"model.path={other}")
    odd = write("odd/config.json", json.dumps({**LLAMA, "logit_scale": 0.5})).parent
    message = refusal(f"model.path={odd}", "steps=ten")
    assert "logit_scale" in message and "'ten'" in message
    assert "mesh.expert" not in refusal(f"model.path={odd}", "mesh.expert=4"), "nobody knows whether it has experts"
    assert "cannot be read" in refusal(f"model.path={write('cut/config.json', '{').parent}")
    assert "is not there" in refusal(f"model.path={tmp_path / 'nowhere'}")
    assert "is a file" in refusal(f"model.path={other / 'config.json'}")


def test_a_checkpoint_folder_fills_the_model_section_from_its_config(llama_folder, tmp_path, write):
    saved = dump(load_config(None, f"model.path={llama_folder}", "steps=77", "model.remat=none"))
    checkpoint = write("run/10/config.toml", saved).parent
    config = load_config(None, f"model.path={checkpoint}")
    assert config.model.hidden_size == 64 and config.model.rope_parameters["rope_theta"] == 500000.0
    assert config.steps == Config().steps and config.model.remat == Config().model.remat
    assert config.model.path == str(checkpoint)
    assert "model.hidden_size" in refusal(f"model.path={checkpoint}", "model.hidden_size=32")


def test_a_hub_name_is_looked_up_and_its_commit_recorded(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(repo_id, revision=None, allow_patterns=None, **_):
        asked.append((repo_id, revision, allow_patterns))
        folder = tmp_path / "snapshots" / "0123abc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    config = load_config(None, "model.path=org/name", "model.revision=main")
    assert config.model.hidden_size == 64 and config.model.path == "org/name" and config.model.revision == "0123abc"
    assert asked == [("org/name", "main", ["config.json"])]  # reading a config downloads no weights
    folder, revision = resolve_model_path(config.model.path, config.model.revision)
    assert (folder.name, revision) == ("0123abc", "0123abc")
    assert asked[1][1] == "0123abc" and "*.safetensors" in asked[1][2]


def test_a_hub_name_without_network_is_refused_with_a_way_out():
    pytest.importorskip("huggingface_hub")
    message = refusal("model.path=org/no-such-model")
    assert "org/no-such-model" in message and "HF_HUB_OFFLINE" in message and "give the folder" in message


# --- writing


def test_dump_reads_back_to_an_equal_config(llama_folder, write):
    config = load_config(
        None, f"model.path={llama_folder}", 'output_dir="quote \\" back\\\\slash é \\u0001 # hash"',
        "data.path=['a', 'b']", "optimizer.learning_rate=1e-05", "optimizer.betas=[0.5, 0.25]",
        "optimizer.schedule=wsd", "optimizer.decay_steps=3",
        "model.rope_parameters={rope_type='linear', rope_theta=1e7, factor=2.0}", "checkpoint.resume=5", "seed=12",
    )  # fmt: skip
    path = write("saved.toml", dump(config))
    again = load_config(path, resolve_path=False)
    assert again == config and hash(again) == hash(config) and dump(again) == dump(config)
    assert again != load_config(path, "seed=13", resolve_path=False)
    assert load_config(path) == config  # and also when the folder is looked at once more
    (llama_folder / "config.json").unlink()
    assert load_config(path, resolve_path=False) == config


def test_an_unset_value_can_only_be_a_default():
    """TOML has no null, so a field that may be None must be None by default, or dump would lose it."""
    for path, field in config_module._leaves().items():
        if type(None) in getattr(field.annotation, "__args__", ()):
            assert field.default is None, path


def test_describe_is_toml_that_says_where_each_value_came_from(write):
    write("base.toml", "seed = 3\n")
    path = write("run.toml", 'extends = "base.toml"\n\n[optimizer]\nschedule = "linear"\n')
    text = describe(load_config(path, "mesh.data=2"))
    lines = {line.split(" =")[0]: line for line in text.splitlines()}
    assert re.search(r"seed = 3  # from .*base\.toml:1$", lines["seed"])
    assert re.search(r'schedule = "linear"  # from .*run\.toml:4$', lines["schedule"])
    assert "data = 2  # from command line" in text and lines["steps"] == "steps = 1000  # from default"
    assert "# decay_steps is unset  # from default" in text
    read = tomllib.loads(text)
    assert read["optimizer"]["schedule"] == "linear" and read["mesh"]["data"] == 2
    # every setting there is appears exactly once
    assert len([line for line in text.splitlines() if "  # from " in line]) == len(config_module._leaves())


def test_schema_knows_every_field_with_its_description_and_accepts_extends():
    schema = json_schema()
    assert schema["properties"]["extends"]["type"] == "string" and schema["additionalProperties"] is False
    optimizer = schema["$defs"]["OptimizerConfig"]["properties"]
    assert optimizer["schedule"]["enum"] == ["constant", "linear", "cosine", "wsd", "smp_cosine"]
    assert all(field.description for path, field in config_module._leaves().items() if path[0] == "optimizer")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.run(
        [sys.executable, "-m", "jaxllm.config", "--schema"], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(printed.stdout)["properties"].keys() == schema["properties"].keys()


# --- those that ship


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_every_config_that_ships_fits_the_devices_of_its_header(file):
    header = file.read_text(encoding="utf-8").partition("\n\n")[0]
    config, on = load_config(file), re.search(r"--on (\S+)", header)
    devices = math.prod(parse_devices(on[1])[1:]) if on else 1  # the quickstart goes anywhere
    if on:
        nodes, gpus = re.search(r"Hardware: (?:(\d+) nodes of )?(\d+) x H100", header).groups(default=1)
        assert int(nodes) * int(gpus) == devices
    check(config, devices)
    assert f"configs/{file.name}" in header and config.output_dir == f"runs/{file.stem}"


# --- resuming


def test_where_and_how_a_run_goes_may_change_at_a_resume_and_what_it_computes_may_not():
    saved = load_config(None, "steps=10", "data.global_batch_size=8")
    assert differences(saved, saved) == ([], [])
    moved = load_config(
        None, "steps=20", "data.global_batch_size=8", "mesh.data=4", "mesh.replica=2", "model.remat=none",
        "output_dir=x", "logging.every=7", "checkpoint.every=3", "data.path=/elsewhere", "evaluation.holdout=0.5",
    )  # fmt: skip
    refused, shown = differences(saved, moved)
    assert refused == []
    text = "\n".join(shown)
    for key in ("steps", "mesh.data", "mesh.replica", "model.remat", "output_dir", "logging.every", "checkpoint.every"):
        assert f"{key}: " in text
    assert "steps: 10 -> 20" in text and "mesh.data: -1 -> 4" in text and "output_dir: 'runs/default' -> 'x'" in text

    other = load_config(
        None, "steps=10", "data.global_batch_size=16", "optimizer.kind=sgd", "optimizer.betas=[0.9, 0.99]", "seed=1",
        "data.seq_len=64", "model.hidden_size=128", "precision.compute=float32",
    )  # fmt: skip
    refused, shown = differences(saved, other)
    assert shown == []
    assert {line.split(":")[0] for line in refused} >= {
        "data.global_batch_size", "optimizer.kind", "optimizer.betas", "seed", "data.seq_len", "model.hidden_size",
        "precision.compute",
    }  # fmt: skip
    assert "optimizer.kind: 'adamw' -> 'sgd'" in refused


def test_a_new_learning_rate_or_schedule_at_a_resume_is_allowed_and_shown_first():
    saved = load_config(None, "steps=40", "optimizer.learning_rate=1e-3")
    now = load_config(
        None,
        "steps=12",
        "output_dir=x",
        "optimizer.learning_rate=1e-4",
        "optimizer.schedule=wsd",
        "optimizer.decay_steps=2",
    )
    refused, shown = differences(saved, now)
    assert refused == []
    assert shown[0].startswith("optimizer.learning_rate: 0.001 -> 0.0001") and "new value is used" in shown[0]
    assert [line.split(":")[0] for line in shown[:3]] == [
        "optimizer.learning_rate", "optimizer.schedule", "optimizer.decay_steps",
    ]  # fmt: skip
    assert {line.split(":")[0] for line in shown[3:]} == {"steps", "output_dir"}


def test_what_decides_which_tokens_are_dropped_is_shown_first_at_a_resume():
    moved = ("output_dir=x", "mesh.data=4", "moe.exchange=allgather", "optimizer.num_microbatches=2")
    unbound, bound = load_config(None, *MIXTRAL), load_config(None, *MIXTRAL, "moe.buffer_factor=1")
    refused, shown = differences(bound, load_config(None, *MIXTRAL, *moved, "moe.buffer_factor=2"))
    assert refused == [] and shown[-1].startswith("output_dir: ")
    assert {line.split(":")[0] for line in shown if "other tokens are dropped" in line} == {
        "mesh.data", "moe.exchange", "optimizer.num_microbatches", "moe.buffer_factor",
    }  # fmt: skip
    refused, shown = differences(unbound, load_config(None, *MIXTRAL, *moved))
    assert refused == [] and not any("dropped" in line for line in shown)
    assert [line.split(":")[0] for line in differences(unbound, bound)[0]] == ["moe.buffer_factor"]


def test_rows_are_no_longer_than_a_short_model_is_meant_for_where_nobody_says():
    config = load_config(None, "model.max_position_embeddings=256")
    assert config.data.seq_len == 256 and "less than the usual 2048" in config._sources["data", "seq_len"]
    assert load_config(None, "model.max_position_embeddings=4096").data.seq_len == 2048
    assert "data.seq_len: 2048 tokens" in refusal("model.max_position_embeddings=256", "data.seq_len=2048")
