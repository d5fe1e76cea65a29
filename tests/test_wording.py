"""Messages name a setting as its reader writes it: by a key of the command line, or by a name of Python."""

import pytest

import adl_dist.training.options
from adl_dist.wording import keys_shown, worded


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("partition.num_stages=50 needs", "num_stages=50 needs"),
        ("use train.batch_size>=4", "use batch_size>=4"),
        ("use partition.tied=untie, or", "use PartitionSpec(tied='untie'), or"),
        ("partition.granularity: there is no 'x'", "PartitionSpec(granularity=...): there is no 'x'"),
        ("method.mitigation=[predict] runtime.device=cpu.",
         "method(mitigation=['predict']) ProcessOptions(device='cpu')."),
        ("runtime.profile_memory=true", "Monitoring(memory=True)"),
        ("choose another loss._target_, or", "choose another loss_fn, or"),
        ("data.num_classes=3 if these are all", "num_classes=3 if these are all"),
        ("an output for each class (model.num_classes)", "an output for each class (num_classes)"),
        ("optimizer.rules[0] sets nothing", "rules[0] sets nothing"),
        ("optimizer.lr and data.root; null: none", "optimizer.lr and data.root; None: none"),
    ],
)  # fmt: skip
def test_a_script_reads_names_of_python(text, shown):
    assert worded(text) == shown
    with keys_shown():
        assert worded(text) == text


def test_the_error_of_a_command_and_of_a_script_differ_in_words():
    with pytest.raises(adl_dist.ConfigError) as refused:
        adl_dist.PartitionSpec(tied="both")
    assert str(refused.value).startswith("PartitionSpec(tied=...): there is no 'both'")
    with keys_shown():
        assert str(refused.value).startswith("partition.tied: there is no 'both'")
