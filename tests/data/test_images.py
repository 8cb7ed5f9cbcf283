"""Images in messages, as they are read: against transformers' own loading."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from jaxrl_async.data.images import file_of, opened, take_images
from jaxrl_async.errors import DataError

pytestmark = pytest.mark.full

SIDEWAYS = 6
"""EXIF's orientation of a camera that was held upright."""


def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 12, 3), np.uint8)
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = SIDEWAYS
    return image


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", exif=image.getexif())
    return stream.getvalue()


def test_a_photo_is_turned_as_its_camera_says(tmp_path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(png(photo()))
    expected = np.asarray(load_image(str(file)))
    assert expected.shape == (12, 8, 3)
    np.testing.assert_array_equal(np.asarray(opened(file_of(str(file), "here"))), expected)
    given = Image.open(file)
    np.testing.assert_array_equal(np.asarray(opened(file_of(given, "here"))), expected)


def test_an_image_with_too_many_pixels_is_a_bad_record(tmp_path, monkeypatch) -> None:
    file = tmp_path / "large.png"
    file.write_bytes(png(photo()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(DataError, match=r"part 0: its image cannot be read: Image size \(96"):
        file_of(str(file), "part 0")


def test_bytes_in_base64_are_an_image_as_transformers_has_it() -> None:
    class Store:
        """Notes what is added."""

        class form:
            mark = "<image>"

        def add(self, image: object, where: str) -> int:
            self.content = file_of(image, where)
            return 0

    store, text = Store(), base64.b64encode(png(photo())).decode()
    part = {"type": "image", "base64": text}
    taken, images = take_images([{"role": "user", "content": [part]}], store)
    assert taken[0]["content"] == "<image>" and images == [0] and store.content == png(photo())
