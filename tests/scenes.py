"""Small detection data sets in VOC's layout, drawn by the tests: a class is a colour, an object a rectangle."""

import json
from xml.etree import ElementTree

import numpy as np
from PIL import Image

NAMES = ("apple", "leaf", "sky")
COLOURS = ((220, 40, 40), (40, 200, 60), (50, 80, 230))
#: Settings of a detector that trains on these scenes within seconds.
SMALL = [
    "backbone=tiny",
    "weights=none",
    "pyramid=16",
    "hidden=32",
    "proposals=60",
    "detections=10",
    "trainable=5",
    "batch.size=4",
    "regions=32",
    "test_size=3",
    "view.short=64",
    "view.long=96",
    "precision=fp32",
    "epochs=2",
    "warmup=2",
    "milestones=[1]",
    "device=cpu",
    "loss.memory=2",
]


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


#: Ids of the categories in :func:`coco_set`: neither contiguous nor in the order of the names.
CATEGORIES = {17: "sky", 3: "leaf", 90: "apple"}


def coco_set(root, exported=False, train=12, test=6):
    """The scenes of :func:`voc_set` as COCO JSON, in COCO's layout or as annotation tools export it.

    Difficult objects are crowds. A category without an object comes first, as some tools write it.
    """
    base = voc_set(root / "voc", train, test)
    ids = {name: number for number, name in CATEGORIES.items()}
    for part, listed in (("train", "trainval"), ("valid" if exported else "val2017", "test")):
        part = f"{part}2017" if part == "train" and not exported else part
        file = root / part / "_annotations.coco.json" if exported else root / f"annotations/instances_{part}.json"
        for folder in (file.parent, root / part):
            folder.mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for number, name in enumerate((base / "ImageSets/Main" / f"{listed}.txt").read_text().split()):
            tree = ElementTree.parse(base / "Annotations" / f"{name}.xml")
            size = {side: int(tree.findtext(f"size/{side}")) for side in ("width", "height")}
            images.append({"id": 1000 - number, "file_name": f"{name}.jpg", **size, "license": 1})
            (base / "JPEGImages" / f"{name}.jpg").rename(root / part / f"{name}.jpg")
            for item in tree.iter("object"):
                x0, y0, x1, y1 = (
                    int(item.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")
                )
                box = [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": 1000 - number,
                        "category_id": ids[item.findtext("name")],
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": int(item.findtext("difficult")),
                        "segmentation": [[1.5, 2.5, 3.5, 4.5]],
                    }
                )
        categories = [{"id": number, "name": name} for number, name in ((0, "things"), *CATEGORIES.items())]
        whole = {"info": {}, "images": images, "annotations": annotations, "categories": categories}
        file.write_text(json.dumps(whole))
    return root
