"""The 2-D sets of MedMNIST v2 (Yang et al., Scientific Data 2023), 28x28, through the medmnist package."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from raypfl.data.files import Expected, require
from raypfl.data.sources.images import Images, StoredConfig
from raypfl.data.sources.npz import ValidationSplit, read_images


class MedmnistConfig(StoredConfig):
    """A MedMNIST set; `root` holds `<name>.npz`."""

    name: Literal[
        "pathmnist",
        "bloodmnist",
        "breastmnist",
        "chestmnist",
        "dermamnist",
        "octmnist",
        "organamnist",
        "organcmnist",
        "organsmnist",
        "pneumoniamnist",
        "retinamnist",
        "tissuemnist",
    ]
    val_split: ValidationSplit = "drop"
    """Dropped by default: the papers partition PathMNIST's official 89,996 training images."""

    @field_validator("name")
    @classmethod
    def _is_single_label(cls, name: str) -> str:
        if name == "chestmnist":
            raise ValueError(
                "chestmnist is multi-label (14 findings an image); the losses and partitions here need one "
                "class an image. Use another MedMNIST set, such as pathmnist."
            )
        return name

    def read(self) -> Images:
        """See `ImageConfig.read`."""
        import medmnist  # 4 seconds: it imports pandas and scikit-image

        info = medmnist.INFO[self.name]
        dataset = getattr(medmnist, info["python_class"])
        file = f"{self.name}.npz"

        def download(folder: Path) -> None:
            dataset(split="test", root=str(folder), download=True)

        require(
            self.name,
            self.root,
            [Expected(file, "md5", info["MD5"])],
            download=download if self.download else None,
            python=(
                f"import medmnist; "
                f"medmnist.{info['python_class']}(split='test', root={str(self.root)!r}, download=True)"
            ),
        )
        return read_images(self.root / file, self.val_split, num_classes=len(info["label"]))
