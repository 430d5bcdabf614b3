"""The configuration in groups: what is refused, and what former arguments are now."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import hf_patches
import lightning_cp
from hf_patches import context_parallel
from lightning_cp import (
    Attention,
    Checkpoints,
    ContextParallel,
    ContextParallelStrategy,
    Memory,
    Parameters,
    Verify,
)
from lightning_cp.config import Config, refuse_fields
from lightning_cp.renamed import ARGUMENTS, explain_argument, group_arguments, update_options

GROUPS = (Attention, Memory, Parameters, Verify, Checkpoints)
CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_every_former_argument_is_a_field_of_a_group():
    names = [f"{group.__name__.lower()}.{one.name}" for group in GROUPS for one in fields(group)]
    assert set(ARGUMENTS.values()) <= set(names)
    assert len(set(ARGUMENTS.values())) == len(ARGUMENTS)


def test_the_changelog_has_the_table_of_former_arguments():
    line = r"^\| `(\w+)` \| `(\w+)=(\w+)\((\w+)=\.\.\.\)` \|$"
    found = re.findall(line, CHANGELOG.read_text(), re.M)
    assert {former: f"{group}.{field}" for former, group, _, field in found} == ARGUMENTS
    assert all(group.capitalize() == name for _, group, name, _ in found)


def test_the_strategy_has_fifteen_arguments():
    names = inspect.signature(ContextParallelStrategy).parameters.values()
    assert len([one for one in names if one.kind is not one.VAR_KEYWORD]) == 15


@pytest.mark.parametrize("name", [*ARGUMENTS, "balance"])
def test_a_former_argument_is_answered_with_what_it_is_now(name):
    line = re.escape(explain_argument(name))
    for build in (
        ContextParallelStrategy,
        lambda **given: ContextParallel(None, **given),
        lambda **given: context_parallel(None, size=2, **given),
    ):
        with pytest.raises(TypeError, match=line):
            build(**{name: None})


def test_all_former_arguments_are_named_at_once():
    with pytest.raises(TypeError, match=r"attention=Attention\(kernel=\.\.\.\); .*verify=Verify\("):
        ContextParallelStrategy(kernel="flex", verify_steps=False)


def test_a_name_that_never_was_is_an_unexpected_argument():
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'kernels'"):
        ContextParallelStrategy(kernels="flex")


def test_files_are_read_under_the_present_names():
    former = {"layout": "auto", "parameter_sharding": "none", "shard_modules": None, "tile": 4}
    grouped = {
        "layout": "auto",
        "memory": {"tile": 4, "offload": "all"},
        "parameters": {"sharding": "none", "shard_modules": None},
    }
    given = {**former, "memory": {"offload": "all"}}
    for path in ("lightning_cp.ContextParallelStrategy", "ContextParallelStrategy"):
        found = update_options({"strategy": {"class_path": path, "init_args": given}})
        assert found["strategy"]["init_args"] == grouped
    theirs = {"class_path": "their.Strategy", "init_args": former}
    assert update_options(theirs) == theirs
    with pytest.raises(ValueError, match=r"parameter_sharding=\.\.\. is now .*: write it into"):
        group_arguments({"parameters": "none", "parameter_sharding": "none"})
    with pytest.raises(ValueError, match=r"kernel=\.\.\. is now .*: write it into attention, and"):
        group_arguments({"kernel": "flex", "attention": {"kernel": "cpu"}})
    with pytest.raises(ValueError, match=r"kernel=\.\.\. is now .*: write it into attention, and"):
        group_arguments({"kernel": "flex", "attention": {"class_path": "lightning_cp.Attention"}})


def test_a_word_stands_for_a_group():
    assert Parameters.of("none") == Parameters(sharding="none")
    assert Parameters.of(Parameters(offload=True)) == Parameters(offload=True)
    assert Verify.of(False) == Verify(steps=False)
    with pytest.raises(ValueError, match="parameters='half' is unknown. Use one of 'auto', 'full'"):
        Parameters.of("half")


@pytest.mark.parametrize("name", ["attention", "memory", "parameters", "verify", "checkpoints"])
def test_a_group_that_is_none_is_refused(name):
    message = rf"{name}=3: give {name}={name.capitalize()}\(\.\.\.\), which has the fields \w+, "
    with pytest.raises(TypeError, match=message):
        Config(**{name: 3})
    if name in ("memory", "verify"):
        with pytest.raises(TypeError, match=message):
            context_parallel(None, size=2, **{name: 3})


@pytest.mark.parametrize(
    ("build", "given", "message"),
    [
        (ContextParallel, {"memory": Memory(True)}, r"checkpointing=True\).*checkpoint_layers\("),
        (ContextParallel, {"memory": Memory(tile=4)}, r"tile=4\) has no effect.*tile_modules\("),
        (ContextParallel, {"memory": Memory(compile="layers")}, r"torch\.compile\(layer\)"),
        (ContextParallel, {"memory": Memory(check=False)}, "lightning-cp plan"),
        (ContextParallel, {"verify": Verify(False)}, r"steps=False\).*lightning_cp\.verify\("),
        (ContextParallel, {"verify": Verify(max_len=64)}, r"max_len=64\).*verify\(model, batch"),
        (ContextParallel, {"verify": Verify(broadcast_batch=True)}, r"cp\.groups\.first\(batch\)"),
        (context_parallel, {"memory": Memory(True)}, r"gradient_checkpointing=True"),
        (context_parallel, {"memory": Memory(tile=True)}, r"tile_modules\(model\)"),
        (context_parallel, {"memory": Memory(compile="layers")}, "layers are not compiled"),
        (context_parallel, {"memory": Memory(offload=1, offload_after=2)}, "Set offload to a num"),
        (context_parallel, {"verify": Verify(max_len=64)}, "truncated as far"),
        (ContextParallelStrategy, {"attention": Attention(ulysses_size=2)}, r"\(inside, between\)"),
    ],
)
def test_what_an_entry_point_does_not_carry_out_is_refused(build, given, message):
    sizes = {"size": 2} if build is context_parallel else {}
    positional = () if build is ContextParallelStrategy else (None,)
    with pytest.raises(ValueError, match=message):
        build(*positional, **sizes, **given)


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (Parameters, {"offload": "none"}, r"offload='none'\) is unknown. Use one of True, False"),
        (Parameters, {"shard_modules": "Block"}, r"'Block'\) is unknown.*a list of names, None"),
        (Parameters, {"reduce_every_microbatch": None}, "Use one of True, False"),
        (Verify, {"steps": "false"}, r"verify=Verify\(steps='false'\) is unknown"),
        (Verify, {"check_batches": "8"}, "Use one of a whole number"),
        (Verify, {"max_len": 20.5}, "Use one of a whole number"),
        (Checkpoints, {"distributed": "false"}, "Use one of True, False"),
        (Memory, {"check": 1}, "Use one of True, False"),
        (Memory, {"offload": True}, "Use one of 'all', 'auto', 'none', a number"),
        (Memory, {"offload": None}, "Use one of 'all', 'auto', 'none', a number"),
        (Memory, {"keep_attention": "a number of GiB"}, "Use one of 'all', 'auto', 'none'"),
        (Memory, {"keep_attention": float("inf")}, "Use one of 'all', 'auto', 'none', a number"),
        (Memory, {"offload": "all", "offload_after": "4"}, "Use one of a number"),
        (Attention, {"memory": "4"}, "Use one of a number, None"),
        (Attention, {"balance_window": 1.5}, "Use one of a whole number, None"),
        (Attention, {"ulysses_size": 0}, r"Attention\(ulysses_size=0\): give a whole number"),
        (Config, {"sequence_dims": "x"}, "sequence_dims='x': give a dict"),
    ],
)
def test_a_value_of_another_type_is_refused(group, values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        group(**values)


def test_a_heartbeat_is_a_time():
    with pytest.raises(TypeError, match=r"heartbeat_timeout=3: give a datetime.timedelta"):
        ContextParallelStrategy(heartbeat_timeout=3)


def test_modules_are_exempt_and_nothing_else():
    with pytest.raises(TypeError, match=r"cp.exempt\('model'\): give modules"):
        ContextParallel(None).exempt("model")


def test_a_former_name_is_answered_by_its_owner():
    with pytest.raises(AttributeError, match=r"ContextParallel.alone is now reference\(batch\)"):
        _ = ContextParallel(None).alone
    with pytest.raises(AttributeError, match=r"hf_patches.whole_rows is now shard_in_forward"):
        _ = hf_patches.whole_rows
    with pytest.raises(AttributeError, match="no attribute 'alone'"):
        _ = hf_patches.alone


def test_an_argument_that_is_gone_names_the_way():
    with pytest.raises(TypeError, match="checkpoint_staging_dir is gone. checkpoints=Check"):
        ContextParallelStrategy(checkpoint_staging_dir="x")


def test_fields_that_were_not_set_are_not_refused():
    refuse_fields(Memory, Memory(offload="all"), {"tile": "", "compile": ""})


def test_positions_are_recorded_until_the_handle_is_removed():
    cp = ContextParallel(None)
    assert not hasattr(cp, "position_edges")
    handle = cp.record_positions([2, 5])
    assert cp._position_edges == (2, 5)
    handle.remove()
    assert cp._position_edges == ()


def test_groups_are_public():
    for group in GROUPS:
        assert getattr(lightning_cp, group.__name__) is group


def test_the_guide_has_every_field():
    page = (CHANGELOG.parent / "docs" / "lightning.md").read_text()
    for group in GROUPS:
        (row,) = re.findall(
            rf"^\| `{group.__name__.lower()}=` \| `{group.__name__}`.*$", page, re.M
        )
        names = re.findall(r"`(\w+)`", row.split("|")[3])
        assert {one.name for one in fields(group)} - {"ulysses_size"} == set(names)
