"""Made-up inputs: what kinds of models get, that it runs, and that the model does not notice."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks import tiny
from hf_geosharp.errors import InputsError
from hf_geosharp.symmetry.inputs import output_tensors, recipe, synthetic
from tests.families import identical, state

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "bert": {"input_ids": (2, 13), "attention_mask": (2, 13)},
    "t5": {"input_ids": (2, 13), "attention_mask": (2, 13), "decoder_input_ids": (2, 10)},
    "vit": {"pixel_values": (2, 3, 64, 64)},
    "vjepa2": {"pixel_values_videos": (2, 4, 3, 64, 64)},
    "clip": {"pixel_values": (2, 3, 64, 64), "input_ids": (2, 13), "attention_mask": (2, 13)},
    "whisper": {"input_features": (2, 16, 48), "decoder_input_ids": (2, 10)},
    "hubert": {"input_values": (2, 8080)},
    "layoutlm": {"input_ids": (2, 13), "attention_mask": (2, 13), "bbox": (2, 13, 4)},
    "pix2struct": {"flattened_patches": (2, 24, 194), "decoder_input_ids": (2, 10)},
    "patchtst": {"past_values": (2, 32, 1)},
    "timesfm": {"past_values": (2, 512), "past_values_padding": (2, 512), "freq": (2, 1)},
    "musicgen_decoder": {"input_ids": (4 * 2, 13)},  # the codes of each codebook in a row of its own
    "dia": {"input_ids": (2, 13), "attention_mask": (2, 13), "decoder_input_ids": (2, 13, 9)},
    "kyutai_speech_to_text": {"input_ids": (2, 13, 4 + 1)},  # those of one moment, with a token of text
    "idefics": {
        "pixel_values": (2, 2, 3, 64, 64), "input_ids": (2, 13), "attention_mask": (2, 13),
        "image_attention_mask": (2, 13, 2),
    },
    "kosmos-2": {
        "pixel_values": (2, 3, 64, 64), "input_ids": (2, 12 + 13), "attention_mask": (2, 12 + 13),
        "image_embeds_position_mask": (2, 12 + 13),
    },
    "paddleocr_vl_vision": {"pixel_values": (1, 48, 3, 8, 8), "grid_thw": (2, 3)},
}  # fmt: skip
"""What each kind of model is given, by name and shape."""


OLD = int(transformers.__version__.split(".")[0]) < 5
"""Transformers 4.x drops a Qwen2-VL's configurations that are objects; its V-JEPA 2 does not run when this small."""

LATE = {"vjepa2", "qwen2_vl", "dia", "musicgen_decoder", "paddleocr_vl_vision"}
"""Types that 4.x does not have, or not so that they run."""


def unless_old(model_type: str, *rest: Any) -> Any:
    marks = pytest.mark.skipif(OLD and model_type in LATE, reason="does not run on transformers 4.x")
    return pytest.param(model_type, *rest, marks=marks, id=model_type)


@pytest.mark.parametrize(("model_type", "shapes"), [unless_old(*item) for item in SHAPES.items()])
def test_every_kind_of_model_gets_what_it_runs_on(model_type: str, shapes: dict[str, tuple[int, ...]]) -> None:
    model = tiny.build(model_type).float()
    batch = synthetic(model)
    assert {k: tuple(v.shape) for k, v in batch.items()} == shapes
    with torch.no_grad():
        model(**batch)


@pytest.mark.parametrize(
    ("model_type", "image"), [unless_old("qwen2_vl", "image_grid_thw"), unless_old("gemma3", "pixel_values")]
)
def test_text_holds_as_many_places_as_the_images_have_features(model_type: str, image: str) -> None:
    model = tiny.build(model_type)
    batch = synthetic(model)
    assert image in batch
    places = (batch["input_ids"] == model.config.image_token_id).sum(1)
    features = 6 if image == "image_grid_thw" else model.config.mm_tokens_per_image  # 4 x 6 patches, merged 2 x 2
    assert places.tolist() == [features, features]


def test_ids_cover_the_vocabulary_without_what_has_a_meaning_and_the_last_row_is_padded() -> None:
    model = tiny.build("bert", vocab_size=30, eos_token_id=None, max_position_embeddings=600)
    model.config.mask_token_id = 7
    batch = synthetic(model, tokens=400)
    assert set(batch["input_ids"].flatten().tolist()) == set(range(3, 30)) - {7}
    assert batch["attention_mask"].sum(1).tolist() == [400, 398]


def test_sequences_are_no_longer_than_the_table_of_positions() -> None:
    assert synthetic(tiny.build("bert", max_position_embeddings=10), tokens=50)["input_ids"].shape == (2, 8)
    # XLNet says by -1 that there is no limit.
    assert synthetic(tiny.build("xlnet"), tokens=50)["input_ids"].shape == (2, 50)


@pytest.mark.parametrize(
    ("size", "sides"),
    [
        (32, (32, 32)),
        ([32], (32, 32)),
        ([16, 24], (16, 24)),
        ((16, 24), (16, 24)),
        ({"height": 16, "width": 24}, (16, 24)),
    ],
    ids=str,
)
def test_sizes_of_images_in_every_notation(size: Any, sides: tuple[int, int]) -> None:
    assert synthetic(Eye(SimpleNamespace(image_size=size)))["pixel_values"].shape == (2, 3, *sides)


def test_nested_configurations_say_what_the_outer_one_does_not() -> None:
    inner = SimpleNamespace(image_size=20, num_channels=5, model_type="eye", to_dict=dict)
    assert synthetic(Eye(SimpleNamespace(vision_config=inner)))["pixel_values"].shape == (2, 5, 20, 20)


def test_a_size_that_the_model_refuses_is_tried_again_with_usual_ones() -> None:
    assert synthetic(Eye(SimpleNamespace(image_size=30), side=224))["pixel_values"].shape == (2, 3, 224, 224)


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    model = tiny.build("llama")
    first, again, other = (synthetic(model, seed=s)["input_ids"] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_its_modes_and_the_random_state_come_back() -> None:
    model = nn.ModuleList([Eye(SimpleNamespace(image_size=8)).train()])[0]
    before, random = state(model), torch.get_rng_state()
    synthetic(model)
    assert identical(model, before)
    assert model.training
    assert model.norm.training
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_made_up_is_named_with_the_reason() -> None:
    with pytest.raises(InputsError, match=r"input 'molecule' of Strange \(TypeError.*pass an example batch"):
        synthetic(Strange())


class Eye(nn.Module):
    """Reads images of one size, or of any; the norm would notice a pass in training mode."""

    main_input_name = "pixel_values"

    def __init__(self, config: Any, side: int | None = None) -> None:
        super().__init__()
        self.config, self.side = config, side
        self.norm = nn.BatchNorm2d(getattr(getattr(config, "vision_config", None), "num_channels", 3))

    def forward(self, pixel_values: Tensor) -> Tensor:
        if self.side and pixel_values.shape[-1] != self.side:
            raise ValueError("the image is of another size")
        return self.norm(pixel_values) + torch.rand(())  # type: ignore[no-any-return]


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, molecule: Tensor, scale: float = 1.0) -> Tensor:
        return self.weight * molecule * scale


def test_a_recipe_makes_what_would_be_made_without_running_the_model_again() -> None:
    model = tiny.build("t5")
    known = recipe(model)
    wanted = synthetic(model, rows=1, tokens=31, seed=4)
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    made = known.batch(rows=1, tokens=31, seed=4)
    assert {k: v.tolist() for k, v in made.items()} == {k: v.tolist() for k, v in wanted.items()}


@pytest.mark.parametrize("model_type", [unless_old(t) for t in ("whisper", "hubert", "musicgen_decoder")])
def test_a_recipe_may_be_for_another_number_of_rows(model_type: str) -> None:
    known = recipe(tiny.build(model_type).float())
    for rows in (1, 3):
        made = known.batch(rows=rows)
        assert {k: v.shape[0] for k, v in made.items()} == {k: v.shape[0] // 2 * rows for k, v in known.first.items()}


def test_what_fails_after_places_were_counted_is_the_reason() -> None:
    model = tiny.build("gemma3").float()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the text part is broken")

    model.language_model.forward = broken
    with pytest.raises(InputsError, match="the text part is broken"):
        synthetic(model)


class Reader(nn.Module):
    """Takes images and sounds of many shapes, and runs with none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=20, image_size=32)
        self.table = nn.Embedding(20, 4)

    def forward(self, input_ids: Tensor, pixel_values: Any = None, input_features: Any = None) -> Tensor:
        if pixel_values is not None or input_features is not None:
            raise ValueError("text alone")
        return self.table(input_ids)  # type: ignore[no-any-return]


def test_text_is_tried_however_many_shapes_images_and_sounds_may_have() -> None:
    assert set(synthetic(Reader())) == {"input_ids"}


class Blind(nn.Module):
    """Gives NaN of images of its own size, and where it is hopeless of every one."""

    main_input_name = "pixel_values"

    def __init__(self, hopeless: bool) -> None:
        super().__init__()
        self.config, self.hopeless = SimpleNamespace(image_size=30), hopeless
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.weight * pixel_values / (0 if self.hopeless or pixel_values.shape[-1] == 30 else 1) * 0


@pytest.mark.parametrize(("hopeless", "side"), [(False, 64), (True, 30)])
def test_inputs_that_give_nan_are_the_last_resort(hopeless: bool, side: int) -> None:
    assert synthetic(Blind(hopeless))["pixel_values"].shape == (2, 3, side, side)


def test_outputs_may_be_plain_objects() -> None:
    @dataclass
    class Output:
        logits: Tensor
        hidden_states: tuple[Tensor, ...]

    logits, hidden = torch.rand(2), torch.rand(3)
    for outputs in (Output(logits, (hidden,)), SimpleNamespace(logits=logits, hidden_states=(hidden,))):
        (found,) = output_tensors(outputs)
        assert found is logits
    assert output_tensors(Output) == []


class Ear(nn.Module):
    """Reads frames of a spectrogram, several side by side, or of something else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_mel_bins=16)
        self.linear = nn.Linear(size, 8)

    def forward(self, input_features: Tensor) -> Tensor:
        return self.linear(input_features)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [16, 64, 12])
def test_the_size_of_frames_that_a_model_asks_for_is_given(size: int) -> None:
    assert synthetic(Ear(size))["input_features"].shape == (2, 96, size)


class Cut(nn.Module):
    """Reads samples in windows that do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_mel_bins=16)
        self.linear = nn.Linear(320, 16)

    def forward(self, input_values: Tensor) -> Tensor:
        if input_values.shape[-1] % 320:
            raise ValueError("samples are no multiple of a window")
        return self.linear(input_values.unflatten(-1, (-1, 320)))  # type: ignore[no-any-return]


class Twice(Cut):
    """The same, and a spectrogram of as many frames."""

    def forward(self, input_values: Tensor, input_features: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_values.squeeze(1)) + input_features


def test_samples_may_be_a_multiple_of_a_window() -> None:
    assert synthetic(Cut())["input_values"].shape == (2, 7680)


def test_a_sound_may_be_given_as_samples_and_as_a_spectrogram_of_the_same_length() -> None:
    batch = synthetic(Twice())
    assert (batch["input_values"].shape, batch["input_features"].shape) == ((2, 1, 96 * 320), (2, 96, 16))


class Prompted(Eye):
    """An image of half the height that is configured, below another one of its size."""

    def forward(self, pixel_values: Tensor, prompt_pixel_values: Tensor) -> Tensor:  # type: ignore[override]
        both = torch.cat([prompt_pixel_values, pixel_values], dim=2)
        if both.shape[2:] != (128, 64):
            raise ValueError("the images are of other sizes")
        return self.norm(both)  # type: ignore[no-any-return]


def test_images_of_one_configured_size_are_of_one_size() -> None:
    batch = synthetic(Prompted(SimpleNamespace(image_size=[128, 64])))
    assert {tuple(x.shape) for x in batch.values()} == {(2, 3, 64, 64)}
