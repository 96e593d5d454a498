"""Configurations: defaults, files, changes, and sentences about mistakes."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import InvalidArgument
from wellposed_lab.runs.config import RunConfig, by_keys, read, resolve
from wellposed_lab.runs.config_sections import extended
from wellposed_lab.runs.run import read_config


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = resolve({"model": {"name": "skip", "gamma": 0.3}}, ["data.classes=[3, 8]", "run.batch_size=null"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert read(tmp_path / "config.yaml") == config
    assert (config.model.gamma, config.data.classes, config.run.batch_size) == (0.3, [3, 8], None)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert read(tmp_path / "empty.yaml") == RunConfig()


@settings(deadline=None, max_examples=25)
@given(lr=st.floats(1e-300, 1e300), width=st.integers(1, 10**9))
def test_changes_keep_every_digit(lr: float, width: int) -> None:
    config = resolve({}, [f"optimizer.lr={lr!r}", f"model.width={width}"])
    assert config.optimizer.lr == lr and config.model.width == width


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-03", ".1e-2"])
def test_numbers_as_people_write_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"optimizer:\n  lr: {text}\n")
    assert read(tmp_path / "c.yaml").optimizer.lr == resolve({}, [f"optimizer.lr={text}"]).optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["optimizer.lrr=1"], r"Unknown key 'optimizer.lrr'.*Did you mean 'lr'\?"),
        (["optimiser.lr=1"], r"Unknown key 'optimiser'.*Did you mean 'optimizer'\?"),
        (["lr=1"], r"section.key=value.*Did you mean 'optimizer.lr=1'\?"),
        (["seed=1"], r"Did you mean 'data.seed=1' or 'run.seed=1'\?"),
        (["run.lr=1"], r"Unknown key 'run.lr'.*Did you mean 'optimizer.lr'\?"),
        (
            ["optimizer.lr"],
            "section.key=value.* It has no value: write for example 'optimizer.lr=0.0005', which is its default",
        ),
        (["model.width"], "got 'model.width'. It has no value: write for example 'model.width=256'"),
        (["model.wdith"], r"section.key=value.*Did you mean 'model.width'\?"),
        (["width"], r"section.key=value.*Did you mean 'model.width'\?"),
        (["optimizer.lr=-1"], "optimizer.lr of the configuration is -1: .*greater than 0"),
        (["optimizer.lr=.nan"], "optimizer.lr of the configuration is nan: .*finite"),
        (["optimizer.lr=fast"], "optimizer.lr of the configuration is 'fast'"),
        (["run.epochs=true"], "run.epochs of the configuration is True"),
        (["run.epochs=1.5"], "run.epochs of the configuration is 1.5"),
        (["run.dtype=float16"], "run.dtype of the configuration is 'float16'"),
        (["data.classes=[0, one]"], r"data.classes of the configuration is \[0, 'one'\].*numbered from 0 in sorted order"),
        (["data.classes=rose,lily"], r"data.classes of the configuration is 'rose,lily'.*classes are given by number"),
        (["data.classes=3"], r"data.classes of the configuration is 3: input should be a valid list\.$"),
        (["model.rtol={a: 1, a: 2}"], "the key 'a' is there twice"),
        (["run.a=1", "run.b=2"], r"Unknown key 'run.a'.*\(1 more key is wrong.\)"),
        (["run.device=[1"], "not a value that YAML knows"),
    ],
)
def test_mistakes_are_named(changes: list[str], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        resolve({}, changes)


def test_a_section_that_is_a_number() -> None:
    with pytest.raises(InvalidArgument, match="'run' of the configuration must be a section"):
        resolve({"run": 3}, ["run.epochs=2"])
    with pytest.raises(InvalidArgument, match="run of the configuration is 3"):
        resolve({"run": 3})


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        read(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: }")
    with pytest.raises(InvalidArgument, match="is not a YAML file"):
        read(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(InvalidArgument, match="must hold sections"):
        read(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model:\n  width: 3\n  name: skip\n  width: 4\n", "the key 'width' is there twice, in line 2 and in line 4; keep one"),
        (
            "run: {seed: 1}\nmodel: {width: 3}\nrun: {seed: 2}\n",
            "the key 'run' is there twice, in line 1 and in line 3; keep one",
        ),
        ("run: {seed: 1, seed: 1}\n", "the key 'seed' is there twice, in line 1; keep one"),
        ("model:\n  width: 3\n   name: skip\n", "is not a YAML file: line 3, column 8: mapping values are not allowed here."),
        ("model:\n  width: [3\nrun: 1\n", "is not a YAML file: line 3, column 4: expected ',' or ']', but got ':'"),
        ("model:\n\twidth: 3\n", "is not a YAML file: line 2, column 1: found character '\\t' that cannot start any token"),
    ],
)
def test_yaml_mistakes_are_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and says in message and "\n" not in message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(InvalidArgument, match="byte 7 is not UTF-8 text"):
        read(tmp_path / "c.yaml")


def test_fingerprint_changes_with_what_numbers_depend_on() -> None:
    constant = resolve({}, ["optimizer.schedule=constant"])
    for same in ("run.epochs=99", "run.keep=5", "run.tensorboard=false", "run.checkpoint_every=7"):
        assert resolve(constant.model_dump(), [same]).fingerprint() == constant.fingerprint()
    for other in ("run.seed=1", "optimizer.lr=1e-9", "model.width=3", "data.n=7", "run.threads=3", "run.certify_every=1"):
        assert resolve(constant.model_dump(), [other]).fingerprint() != constant.fingerprint()
    assert resolve({}, ["run.epochs=99"]).fingerprint() != RunConfig().fingerprint()  # a cosine knows its end


def test_a_longer_run_knows_the_shorter_ones_that_it_continues() -> None:
    short = RunConfig()
    longer = extended(short, resolve({}, ["run.epochs=40"]))
    longest = extended(longer, resolve(longer.model_dump(), ["run.epochs=50"]))
    assert longest.run.extended == [20, 40]
    assert longest.fingerprints()[:-1] == [short.fingerprint(), longer.fingerprint()]
    assert longest.fingerprint() not in longest.fingerprints()[:-1] and not short.fingerprints()[:-1]
    assert resolve({}, ["run.epochs=50"]).fingerprint() != longest.fingerprint()
    with pytest.raises(InvalidArgument, match="may not change"):
        extended(short, resolve({}, ["run.epochs=40", "run.seed=3"]))
    for wrong in ([20], [3, 2], [0]):
        with pytest.raises(InvalidArgument, match="must rise, below epochs=20"):
            resolve({}, [f"run.extended={wrong}"])


def test_checkpoints_of_runs_before_a_key_was_added_stay_usable() -> None:
    """The fingerprint of the default configuration, as the first runs have it in their checkpoints."""
    assert RunConfig().fingerprint() == "d25c05114919ee8a33341cfe3b2affae4b09bcabbceb7f05e6e61e03d4299a7f"


def test_classes_may_be_written_with_commas():
    assert resolve({}, ["data.classes=3,8"]).data.classes == resolve({}, ["data.classes=[3, 8]"]).data.classes == [3, 8]
    assert resolve({}, ["data.classes=0, 1, 2"]).data.classes == [0, 1, 2]
    for wrong in ("3;8", "3,", "a,b", "1.5,2"):
        with pytest.raises(InvalidArgument, match=r"data\.classes"):
            resolve({}, [f"data.classes={wrong}"])


#: Nine levels of nine aliases each: half a billion values in 400 bytes.
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: {n: 2001-13-45}", "a value that YAML cannot read"),
        ("data: {n: 2001-01-01}", "data.n of .* is datetime.date"),
        ("data: {n: !!float x}", "a value that YAML cannot read"),
        ("data: {n: !!int ''}", "a value that YAML cannot read"),
        ("data: {n: !!binary é}", "YAML"),
        (f"data: {{n: {'9' * 5000}}}", "a value that YAML cannot read"),
        (f"data: {{n: 0x{'f' * 5000}}}", "whole numbers go up to 2\\^63 - 1; got one of about 6021 digits"),
        ("[" * 5000, "nested too deeply"),
        ("data: &a [*a]", "the alias in line 1 holds itself"),
        ("data: &a {b: *a}", "the alias in line 1 holds itself"),
        (BOMB, "more than 10,000 values with all aliases written out"),
        ("x: &a {b: 1}\n" + "<<: [*a, *a]\n", "Unknown key"),
        ("# " + "x" * 70_000, "has 70,002 bytes; a file of this kind has at most 65,536"),
        ("? [1, 2]\n: 3", "not a YAML file|is not"),
        ('run: {device: "\\uD800"}', "run.device of .* unicode"),
    ],
)
def test_hostile_yaml_is_one_sentence_at_once(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.process_time()  # not by the clock: others may have the processor
    with pytest.raises(InvalidArgument, match=says) as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "key", ["data.seed", "run.seed", "data.n", "run.batch_size", "model.width", "run.threads", "data.size"]
)
@pytest.mark.parametrize("value", [2**63, 10**30, 10**400])
def test_numbers_that_nothing_can_work_with(key: str, value: int) -> None:
    section, name = key.split(".")
    with pytest.raises(InvalidArgument):
        resolve({}, [f"{key}=0x{value:x}"])
    with pytest.raises(InvalidArgument, match=f"{key} of the configuration is "):
        resolve({section: {name: value}})


def test_aliases_still_work(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {seed: &s 7}\nrun: {seed: *s}\n")
    assert read(tmp_path / "c.yaml").run.seed == 7


def test_a_configuration_in_a_run_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "private.yaml").write_text("run: {seed: 7}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").symlink_to(tmp_path / "private.yaml")
    with pytest.raises(InvalidArgument, match="is a link"):
        read_config(tmp_path / "run")
    assert read(tmp_path / "run" / "config.yaml").run.seed == 7  # named by its user


@pytest.mark.parametrize("key", ["run.device", "data.name", "data.target"])
def test_a_text_that_no_message_could_quote(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}.*at most 1000 characters") as caught:
        resolve({}, [f"{key}={'f' * 5000}"])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("package", ["yaml", "pydantic"])
def test_a_missing_package_is_named_with_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None\nimport wellposed_lab.runs.config"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingPackage: Configurations and runs need PyYAML and pydantic" in ended.stderr
    assert "wellposed[cli]" in ended.stderr


def test_advice_is_what_a_configuration_can_follow() -> None:
    message = "Shrink the weights, or pass on_ill_posed='warn' to continue without proof."
    assert by_keys(message) == "Shrink the weights, or take a smaller optimizer.lr."
