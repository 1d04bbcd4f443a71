from setuptools import find_packages, setup

setup(packages=[f"crosstrain.{name}" for name in find_packages(include=["components*", "pipelines*"])])
