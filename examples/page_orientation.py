"""Which way up is a picture of a page? A network that labels pictures, here with 0, 90, 180 or 270 degrees.

usage: python examples/page_orientation.py [PICTURE ...]

After `rlx fetch orientation`; it needs Pillow (the extra image).
"""

from __future__ import annotations

import sys

import numpy as np

import rlx

try:
    from PIL import Image
    from read_page import draw_page
except ImportError:
    sys.exit("this needs Pillow: pip install pillow")

LABELS = (0, 90, 180, 270)


def main() -> None:
    if len(sys.argv) > 1:
        pictures = [Image.open(path).convert("RGB") for path in sys.argv[1:]]
    else:
        page = draw_page()
        pictures = [page, page.transpose(Image.Transpose.ROTATE_180)]
    model = rlx.load(rlx.demo.path("orientation"), device="cpu")
    images = np.stack([np.asarray(picture.resize((224, 224)), np.float32) / 255 for picture in pictures])
    images = (images - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    (scores,) = model.run([images.transpose(0, 3, 1, 2).astype(np.float32)])
    for row in scores:
        print(f"{LABELS[row.argmax()]} degrees ({row.max():.2f})")


if __name__ == "__main__":
    try:
        main()
    except rlx.errors.NameNotFound as missing:  # a model is not there yet
        sys.exit(str(missing))
