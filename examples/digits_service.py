"""A web service over a compiled graph: POST /digits with images gives what they show.

usage: uvicorn --app-dir examples digits_service:app     it needs fastapi and uvicorn

    IMAGE=$(python -c 'print([[0.0] * 8] * 8)')
    curl localhost:8000/digits -H 'content-type: application/json' -d "{\"images\": [$IMAGE]}"
"""

from __future__ import annotations

import numpy as np
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import rlx

app = FastAPI(title="digits")
model = rlx.load(rlx.demo.path("digits"), dims={"batch": (1, 64)}, device="cpu")


class Images(BaseModel):
    """Up to 64 images of 8 x 8 pixels, each 0 (paper) to 16 (ink)."""

    images: list[list[list[float]]]


class Digits(BaseModel):
    """The digit of each image, and how probable it is."""

    digits: list[int]
    probabilities: list[float]


@app.post("/digits")
async def read(body: Images) -> Digits:
    """Runs wait for each other in the graph's queue, so requests may come at once; the event loop never waits."""
    try:
        images = np.array(body.images, np.float32)[:, None]
        (found,) = await model.arun({"image": images})
    except (rlx.errors.RlxError, ValueError, IndexError) as error:  # a wrong shape, or too many
        raise HTTPException(422, str(error)) from error
    return Digits(digits=found.argmax(axis=1).tolist(), probabilities=found.max(axis=1).tolist())


@app.get("/health")
async def health() -> dict[str, str]:
    """What runs here, and where."""
    return {"model": "digits", "device": model.device, "rlx": rlx.__version__}
