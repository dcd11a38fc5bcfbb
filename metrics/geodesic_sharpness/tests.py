"""Calls of the metric and what they give, on models that ship with it; in float64, so that the digits are the same."""

_ON_CPU = {"dtype": "float64", "device": "cpu", "steps": 5}
_DIGITS = {**_ON_CPU, "samples": 64, "batch_size": 32}
_REVIEWS = {
    **_ON_CPU,
    "model_id": "demo:vader-bert",
    "batch_size": 2,
    "predictions": ["a wonderful film", "dull and far too long", "the cast is superb", "a waste of time"],
}

test_cases = [
    {**_DIGITS, "model_id": "demo:digits-vit", "result": {"geodesic_sharpness": 0.378933, "stderr": 0.0607438}},
    # The same function at other weights.
    {**_DIGITS, "model_id": "demo:digits-vit-twin", "result": {"geodesic_sharpness": 0.378933, "stderr": 0.0607438}},
    {
        **_DIGITS,
        "model_id": "demo:digits-vit",
        "metric": "mix",
        "result": {"geodesic_sharpness": 0.0777227, "stderr": 0.00342331},
    },
    {
        **_REVIEWS,
        "references": ["positive", "negative", "positive", "negative"],
        "result": {"geodesic_sharpness": 0.00198905, "stderr": 0.00156481},
    },
    {**_REVIEWS, "references": [1, 0, 1, 0], "result": {"geodesic_sharpness": 0.00198905, "stderr": 0.00156481}},
    {**_REVIEWS, "labels": "model", "result": {"geodesic_sharpness": 0.000357043, "stderr": 0.000347162}},
]
