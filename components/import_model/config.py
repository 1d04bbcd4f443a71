"""Configuration of import_model."""

from pydantic import Field

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import OutputURI


class Config(Base):
    """Take a plain Hugging Face model folder or prefix in, by reference: check it, hash it, write its manifest."""

    source: str = Field(min_length=1)
    """Folder or prefix (path, file://, s3://, minio://) with config.json and safetensors weights; the files
    stay where they are, and must not change afterwards."""
    output: OutputURI
    """Where the model manifest is written."""
