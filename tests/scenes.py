"""Small detection data sets in VOC's layout, drawn by the tests: a class is a colour, an object a rectangle."""

import numpy as np
from PIL import Image

NAMES = ("apple", "leaf", "sky")
COLOURS = ((220, 40, 40), (40, 200, 60), (50, 80, 230))


def annotation(objects, size=(64, 48), extra=""):
    """The XML of an image; an object is (name, (xmin, ymin, xmax, ymax), difficult)."""
    body = "".join(
        f"<object><name>{name}</name><difficult>{int(hard)}</difficult><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for name, (x0, y0, x1, y1), hard in objects
    )
    width, height = size
    return (
        f"{extra}<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        f"{body}</annotation>"
    )


def scene(base, name, seed, kind="PNG"):
    """One image with one or two rectangles; in some the second is difficult, some have none."""
    generator = np.random.default_rng(seed)
    size = (64, 48) if seed % 3 else (44, 60)
    pixels = generator.integers(90, 110, (size[1], size[0], 3))
    objects = []
    many = 0 if seed % 5 == 3 else 2 if seed % 4 == 0 else int(generator.integers(1, 3))
    for number in range(many):
        label = int(generator.integers(0, 3))
        wide, high = generator.integers(14, 26, 2)
        left, top = generator.integers(0, size[0] - wide), generator.integers(0, size[1] - high)
        pixels[top : top + high, left : left + wide] = COLOURS[label]
        hard = number == 1 and seed % 4 == 0
        objects.append((NAMES[label], (left + 1, top + 1, left + wide, top + high), hard))
    (base / "JPEGImages").mkdir(parents=True, exist_ok=True)
    (base / "Annotations").mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(base / "JPEGImages" / f"{name}.jpg", kind)
    (base / "Annotations" / f"{name}.xml").write_text(annotation(objects, size))


def voc_set(root, train=12, test=6):
    """``root/{Annotations, ImageSets/Main, JPEGImages}`` with lists trainval and test."""
    (root / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    for part, numbers in (("trainval", range(train)), ("test", range(100, 100 + test))):
        names = [f"{number:06d}" for number in numbers]
        for number, name in zip(numbers, names, strict=True):
            scene(root, name, number)
        (root / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(names) + "\n")
    return root
