"""The page of the Space: a form around the metric.

It is built here because the launcher that evaluate has is made for a gradio of the past.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr  # type: ignore[import-not-found,unused-ignore]

from hf_geosharp.errors import GeosharpError
from hf_geosharp.metric import GeodesicSharpness
from hf_geosharp.sharpness.choices import METRICS

CARD = Path(__file__).with_name("README.md").read_text(encoding="utf-8").split("---\n", 2)[2]

metric = GeodesicSharpness()


def measure(
    model_id: str, data: str, measure_with: str, rho: float, samples: float, batch_size: float, steps: float
) -> tuple[float, Any]:
    """The score and the full result; radius 0 and no data stand for the defaults."""
    try:
        found = metric.compute(
            model_id=model_id.strip(),
            data=data.strip() or None,
            metric=measure_with,
            rho=rho or None,
            samples=int(samples),
            batch_size=int(batch_size),
            steps=int(steps),
            details=True,
        )
    except GeosharpError as error:
        raise gr.Error(str(error)) from error
    assert found is not None  # only processes other than the first get nothing
    return found["geodesic_sharpness"], found["details"]


with gr.Blocks(title="Geodesic sharpness") as page:
    fields = [
        gr.Textbox("demo:digits-vit", label="Model: an id on the Hub, or demo:digits-vit, demo:vader-bert"),
        gr.Textbox("", label="Data set: an id on the Hub; empty for the one named by the model card"),
        gr.Dropdown(list(METRICS), value="inv", label="Metric of the ball"),
        gr.Number(0, label="Radius; 0 for the metric's default"),
        gr.Number(128, precision=0, label="Samples"),
        gr.Number(64, precision=0, label="Samples per ball"),
        gr.Number(10, precision=0, label="Ascent steps"),
    ]
    button = gr.Button("Measure")
    results = [gr.Number(label="Geodesic sharpness, in units of the loss"), gr.JSON(label="Full result")]
    button.click(measure, inputs=fields, outputs=results)
    gr.Markdown(CARD)

if __name__ == "__main__":
    page.launch()
