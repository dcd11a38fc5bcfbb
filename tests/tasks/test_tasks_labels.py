"""Labels of the data become the model's class numbers, or an error that names value, row and range."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import ClassLabel, Value

from hf_geosharp.errors import DataError, DataWarning, UsageError
from hf_geosharp.tasks.labels import check_range, convert_labels, label_rule


def model(*names, **changes):
    ids = {name: i for i, name in enumerate(names)}
    values = {"num_labels": len(names), "label2id": ids, "id2label": {i: n for n, i in ids.items()}}
    return SimpleNamespace(**({"problem_type": None} | values | changes))


GENERIC = model("LABEL_0", "LABEL_1")
NAMED = model("NEGATIVE", "POSITIVE")


def convert(values, feature, config, label_map=None):
    rule = label_rule(feature, config, "label", label_map)
    return convert_labels(rule, values, [10 + i for i in range(len(values))], "label")


def test_names_decide_whatever_their_case_and_order():
    assert convert([0, 1, 1], ClassLabel(names=["positive", "negative"]), NAMED) == [1, 0, 0]
    assert convert(["Positive", "negative "], Value("string"), NAMED) == [1, 0]


def test_classes_of_the_model_that_the_data_lack():
    assert convert([0, 1], ClassLabel(names=["b", "c"]), model("a", "b", "c")) == [1, 2]


def test_names_that_differ_in_case_alone_are_told_apart():
    letters = model("A", "a", "b")
    assert convert(["a", "A", "B"], Value("string"), letters) == [1, 0, 2]
    assert convert([0, 1], ClassLabel(names=["a", "A"]), letters) == [1, 0]
    assert convert(["x", "y"], Value("string"), letters, {"x": "A", "y": "a"}) == [0, 1]
    assert convert(["Yes", "yes"], Value("string"), NAMED, {"Yes": 1, "yes": 0}) == [1, 0]


@pytest.mark.parametrize(
    ("values", "feature", "config"),
    [
        (["YES"], Value("string"), model("Yes", "yes")),
        ([0], ClassLabel(names=["YES", "no"]), model("Yes", "yes")),
        # Tables that contradict each other.
        (["no"], Value("string"), model("no", "yes", label2id={"yes": 0, "no": 1})),
        ([0, 1], ClassLabel(names=["no", "nay"]), model("no", "yes", label2id={"nay": 0, "yes": 1})),
        # 1 may be the class 1, or the one that is called so.
        ([1, 2], Value("int64"), model("1", "2", "3")),
        ([0.0], Value("float64"), model("1", "2", "0")),
        (["1", "0"], Value("string"), model("1", "2", "3")),
    ],
)
def test_labels_that_may_be_several_classes_are_refused(values, feature, config):
    with pytest.raises(DataError, match="--label-map"):
        convert(values, feature, config)


def test_a_label_of_several_classes_is_told_as_such():
    with pytest.raises(DataError, match="may be several classes"):
        convert(["YES"], Value("string"), model("Yes", "yes"))


def test_numbers_of_a_column_that_are_not_those_of_the_classes():
    """Even where the rows that are scored have others: of many classes few rows have the last one."""
    rule = label_rule(Value("int64"), GENERIC, "stars")
    check_range(rule, [0, 1, None, -1, float("nan")], "stars")
    with pytest.raises(DataError, match=r"'stars' has labels up to 2.*num_labels = 2.*--label-map"):
        check_range(rule, [1, 2], "stars")


def test_names_that_are_numbers():
    stars = model("1", "2", "3")
    assert convert(["1", "3"], Value("string"), stars) == [0, 2]
    assert convert([0, 1], ClassLabel(names=["3", "1"]), stars) == [2, 0]
    assert convert([1, 3], Value("int64"), stars, {"1": "1", "3": "3"}) == [0, 2]
    assert convert([1, 3], Value("int64"), stars, {"1": 0, "3": 2}) == [0, 2]
    assert convert([0, 1], Value("int64"), model("0", "1")) == [0, 1]


def test_truth_values():
    assert convert([True, False], Value("bool"), model("True", "False")) == [0, 1]
    assert convert([True, False], Value("bool"), NAMED) == [1, 0]
    assert convert([True, False], Value("bool"), NAMED, {"true": "NEGATIVE", "false": 1}) == [0, 1]


def test_numbers():
    assert convert([0, 1, 1.0, True], Value("int64"), GENERIC) == [0, 1, 1, 1]
    assert convert(["0", "LABEL_1"], Value("string"), GENERIC) == [0, 1]


def test_generic_names_are_taken_by_number_and_said():
    with pytest.warns(DataWarning, match=r"neg, pos.*--label-map"):
        assert convert([1, 0], ClassLabel(names=["neg", "pos"]), GENERIC) == [1, 0]


def test_a_label_map():
    names = ClassLabel(names=["sad", "happy"])
    assert convert([0, 1], names, NAMED, {"happy": "negative", "sad": 1}) == [1, 0]
    assert convert(["sad", "Happy"], Value("string"), NAMED, {"happy": "NEGATIVE", "sad": "POSITIVE"}) == [1, 0]
    assert convert([5, 7], Value("int64"), NAMED, {"5": 1, "7": 0}) == [1, 0]
    # A csv file in which one label is missing has fractions.
    assert convert([5.0, 7.0], Value("float64"), NAMED, {"5": 1, "7": 0}) == [1, 0]
    assert convert([" sad"], Value("string"), NAMED, {"sad ": 1}) == [1]
    with pytest.raises(DataError, match=r"'sad'.*row 10"):
        convert(["sad"], Value("string"), NAMED, {"happy": 0})
    with pytest.raises(UsageError, match=r"'happy' to 'glad'"):
        convert([0], names, NAMED, {"happy": "glad"})
    with pytest.raises(UsageError, match=r"label_map.*predicts a number"):
        convert([0], Value("int64"), model("LABEL_0"), {"0": 1})


@pytest.mark.parametrize(
    ("values", "feature", "config", "culprit"),
    [
        ([0, -1], Value("int64"), NAMED, r"-1 \(column 'label', row 11\).*0 to 1.*no labels.*--label-map"),
        ([1, 2], Value("int64"), NAMED, r"2 \(column 'label', row 11\) is out of range.*0 to 1.*--label-map"),
        ([0, -1], ClassLabel(names=["negative", "positive"]), NAMED, r"-1 .*row 11"),
        ([2], Value("int64"), NAMED, r"2 .*row 10.*num_labels = 2.*0 to 1"),
        ([None], Value("int64"), NAMED, r"missing.*row 10"),
        (["meh"], Value("string"), NAMED, r"'meh'.*--label-map"),
        ([0.5], Value("float64"), NAMED, r"0\.5.*row 10"),
        ([float("inf")], Value("float64"), NAMED, r"inf \(column 'label', row 10\)"),
        ([[0, 1]], Value("int64"), NAMED, r"one label per sample"),
        ([0], ClassLabel(names=["positive", "neutral"]), NAMED, r"positive, neutral.*NEGATIVE, POSITIVE.*--label-map"),
        ([0], ClassLabel(names=["a", "b", "c"]), GENERIC, r"3 classes.*num_labels = 2"),
        (["x"], Value("string"), model("LABEL_0"), r"'x'.*num_labels = 1"),
        ([float("nan")], Value("float64"), model("LABEL_0"), r"nan"),
    ],
)
def test_labels_that_do_not_fit(values, feature, config, culprit):
    with pytest.raises(DataError, match=culprit):
        convert(values, feature, config)


def test_several_labels_a_sample():
    with pytest.raises(DataError, match="multi-label"):
        convert([0], Value("int64"), model("a", "b", problem_type="multi_label_classification"))


def test_a_class_that_is_called_minus_one_can_be_mapped():
    assert convert([-1, 1], Value("int64"), NAMED, {"-1": 0, "1": 1}) == [0, 1]
