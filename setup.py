from setuptools import find_packages, setup

# The recipes stand at the top of the repository and inside the package in a wheel: `--config NAME` finds them there.
setup(
    packages=[*find_packages(include=["soft_trainer*"]), "soft_trainer.recipes"],
    package_dir={"soft_trainer.recipes": "recipes"},
)
