"""The manifests of recipes/launch/kubernetes: they name what exists, and their command trains.

All fields went through the published models of both APIs without loss: kubeflow-trainer-api 2.3.0
and kubeflow-training 1.9.4 (docs/kubernetes.md says how to do it again). `FIELDS` holds the ones
that a later version could rename.
"""

import os
import re
import sys

import pytest
import yaml

from recipes.files import CONFIGS
from tests.lightning.scripts.start import ROOT, Job, free_port
from tests.recipes.test_cli import print_config, small_config, steps_of

FOLDER = ROOT / "recipes" / "launch" / "kubernetes"
FIELDS = {
    "PyTorchJob": (
        "kubeflow.org/v1",
        {"nprocPerNode", "pytorchReplicaSpecs", "runPolicy"},
    ),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", {"runtimeRef", "trainer"}),
    "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", {"mlPolicy", "template"}),
    "PersistentVolumeClaim": ("v1", {"accessModes", "resources", "storageClassName"}),
}
NODES, DEVICES = 2, 8


def documents():
    """Every document of every manifest, by kind."""
    files = sorted(FOLDER.glob("*.yaml"))
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return {document["kind"]: document for document in found}


def pods():
    """The pod of each API, and the container in which torchrun runs, with its command."""
    found = documents()
    replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    yield pod, container

    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = found["TrainJob"]["spec"]["trainer"]
    command = {key: given[key] for key in ("command", "args", "image")}
    yield pod, container | command | {"resources": given["resourcesPerNode"]}


def test_manifests_hold_the_fields_that_were_checked():
    found = documents()
    assert found.keys() == FIELDS.keys()
    for kind, (version, fields) in FIELDS.items():
        assert found[kind]["apiVersion"] == version
        assert found[kind]["spec"].keys() == fields
    # Names by which the operators find the containers.
    assert [container["name"] for _, container in pods()] == ["pytorch", "node"]
    runtime = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert (runtime["name"], runtime["template"]["metadata"]["labels"][label]) == (
        "node",
        "trainer",
    )
    assert found["TrainJob"]["spec"]["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": found["TrainingRuntime"]["metadata"]["name"],
    }


def test_both_apis_start_the_same_pods():
    found, (first, second) = documents(), pods()
    for key in ("command", "args", "image", "env", "resources", "volumeMounts", "workingDir"):
        assert first[1][key] == second[1][key], key
    assert first[0]["volumes"] == second[0]["volumes"]
    claim = found["PersistentVolumeClaim"]
    assert first[0]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = {mount["name"]: mount["mountPath"] for mount in first[1]["volumeMounts"]}
    assert mounts == {"shared": first[1]["workingDir"], "memory": "/dev/shm"}
    # The numbers of nodes and devices agree.
    replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert sum(each["replicas"] for each in replicas) == trainer["numNodes"] == NODES
    gpus = first[1]["resources"]["limits"]["nvidia.com/gpu"]
    assert {found["PyTorchJob"]["spec"]["nprocPerNode"], str(trainer["numProcPerNode"]), gpus} == {
        str(DEVICES)
    }


def expand(container, **variables):
    """The container's command, with references as Kubernetes replaces them."""
    command = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda name: str(variables[name[1]]), arg) for arg in command]


def test_the_command_names_what_exists(capsys):
    for _, container in pods():
        command = expand(container, PET_NNODES=NODES, PET_NPROC_PER_NODE=DEVICES)
        assert command[:4] == ["torchrun", "-m", "recipes", "fit"]
        (config,) = [arg.split("=")[1] for arg in command if arg.startswith("--config=")]
        assert (CONFIGS / config).is_file()
        options = yaml.safe_load(print_config(capsys, *command[4:]))
        assert options["ckpt_path"] == "last"
        trainer = options["trainer"]
        assert (int(trainer["num_nodes"]), int(trainer["devices"])) == (NODES, DEVICES)
        # Everything that is written lies in the working directory: the shared volume.
        saver = trainer["callbacks"][0]["init_args"]
        for folder in (saver["dirpath"], trainer["default_root_dir"]):
            assert not os.path.isabs(folder)


def test_the_image_has_what_the_command_needs():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"lightning_cp", "hf_patches", "recipes", "pyproject.toml", "constraints.txt"} <= copied
    (image,) = {container["image"] for _, container in pods()}
    assert any(image in line for line in lines)
    assert any(line.endswith(next(pods())[1]["workingDir"]) for line in lines)


@pytest.mark.slow
def test_pods_train_and_resume(tmp_path):
    """Two pods of one CPU process, with the variables that both operators set."""
    config = small_config(tmp_path)
    container = next(pods())[1]
    with Job(tmp_path) as job:
        for steps in (4, 6):
            port = free_port()
            for node in range(2):
                command = expand(container, PET_NNODES=2, PET_NPROC_PER_NODE=1)
                command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
                command = [f"--config={config}" if "--config" in arg else arg for arg in command]
                job.start(
                    [*command, f"--trainer.max_steps={steps}"],
                    PET_NNODES=2,
                    PET_NPROC_PER_NODE=1,
                    PET_NODE_RANK=node,
                    PET_MASTER_ADDR="127.0.0.1",
                    PET_MASTER_PORT=port,
                )
            outcome = job.wait(limit=900)
            assert set(outcome.codes) == {0}, outcome.text
    assert steps_of(tmp_path / "run") == [[0, 1, 2, 3], [4, 5]]
