"""Every documented name is where its page has it, and is called as its page says."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC
from types import SimpleNamespace
from typing import Any

import pytest

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer
from rlightning.env import BaseEnv, EnvGroup
from rlightning.types import (
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from rlightning.utils.config import Config, EnvConfig

NAMES = {
    "rlightning.types": "BatchedData EnvMeta EnvRet MultiAgentEnvRet PolicyResponse "
    "MultiAgentPolicyResponse Processed_EnvRet_fields",
    "rlightning.types.batched_data": "BatchedData",
    "rlightning.types.env_rets": "EnvRet MultiAgentEnvRet Processed_EnvRet_fields",
    "rlightning.types.metadata": "EnvMeta",
    "rlightning.types.policy_response": "PolicyResponse MultiAgentPolicyResponse",
    "rlightning.buffer": "BufferConfig DataBuffer ReplayBuffer RolloutBuffer SamplerConfig StorageConfig",
    "rlightning.buffer.base_buffer": "DataBuffer",
    "rlightning.buffer.replay_buffer": "ReplayBuffer",
    "rlightning.buffer.rollout_buffer": "RolloutBuffer",
    "rlightning.buffer.sampler": "UniformSampler BatchSampler AllDataSampler build_sampler",
    "rlightning.buffer.utils": "Storage BufferView EpisodeTable",
    "rlightning.buffer.utils.storage": "Storage BufferView",
    "rlightning.buffer.utils.container": "DataContainer",
    "rlightning.buffer.utils.table": "EpisodeTable",
    "rlightning.buffer.utils.preprocessors": "Preprocessor NonPreprocessor BoxFlattenPreprocessor "
    "DiscretePreprocessor default_obs_preprocessor default_reward_preprocessor get_preprocessor_cls",
    "rlightning.buffer.utils.preprocess": "default_preprocess_fn default_obs_preprocessor",
    "rlightning.buffer.utils.postprocess": "default_postprocess_fn default_compute_gae",
    "rlightning.buffer.utils.utils": "default_env_ret_preprocess_fn "
    "default_policy_resp_preprocess_fn default_preprocess_fn default_postprocess_fn "
    "default_compute_gae default_gae_no_loop default_obs_preprocessor default_reward_preprocessor",
    "rlightning.env": "BaseEnv EnvGroup EnvMeta build_env_group",
    "rlightning.env.base_env": "BaseEnv",
    "rlightning.env.env_group": "EnvGroup EnvStepCounter ThroughputTracker",
    "rlightning.env.env_server": "RemoteEnvServer",
    "rlightning.env.remote_env.env_client": "RemoteEnvClient",
    "rlightning.env.ale_env": "ALEEnv",
    "rlightning.env.isaac_env": "IsaacManagerBasedRLEnv",
    "rlightning.env.isaac_marl_env": "",
    "rlightning.env.libero_env": "LiberoEnv",
    "rlightning.env.maniskill_env": "ManiskillEnv",
    "rlightning.env.mujoco_env": "MujocoEnv",
    "rlightning.env.piper_env": "PiperEnv",
    "rlightning.env.utils.utils": "default_env_preprocess_fn",
    "rlightning.env.utils.venv": "ReconfigureSubprocEnv ReconfigureSubprocEnvWorker",
    "rlightning.env.utils.libero_utils": "to_tensor tile_images put_text_on_image "
    "put_info_on_image list_of_dict_to_dict_of_list get_libero_image get_libero_wrist_image "
    "quat2axisangle save_rollout_video get_benchmark_overridden",
    "rlightning.utils.builders": "build_data_buffer build_env_group build_policy_group",
    "rlightning.utils.config": "BufferConfig ClusterConfig Config EnvConfig LogConfig MainConfig "
    "PolicyConfig SamplerConfig StorageConfig TrainConfig WeightBufferConfig",
    "rlightning.utils.config.config": "BufferConfig Config EnvConfig MainConfig",
    "rlightning.utils.utils": "InternalFlag to_device to_numpy torch_dtype_from_precision",
}

_ENV_META = "env_id=None, action_space=None, observation_space=None, num_envs=None"
_ENV_RET = (
    "env_id, observation, last_reward=0.0, last_terminated=False, last_truncated=False, "
    "info=<factory>, _extra=<factory>, ts_env_sent_ns=<factory>"
)
_FUNCTIONS = (
    "obs_preprocessor=default_obs_preprocessor, reward_preprocessor=default_reward_preprocessor, "
    "env_ret_preprocess_fn=default_env_ret_preprocess_fn, "
    "policy_resp_preprocess_fn=default_policy_resp_preprocess_fn, "
    "preprocess_fn=default_preprocess_fn, postprocess_fn=default_postprocess_fn"
)

# What is called, and with what; what comes behind that in a signature here is optional.
SIGNATURES = {
    "rlightning.types:BatchedData": "ids, data",
    "rlightning.types:BatchedData.from_dict": "data_dict",
    "rlightning.types:BatchedData.ids": "",
    "rlightning.types:BatchedData.items": "",
    "rlightning.types:BatchedData.values": "",
    "rlightning.types:EnvMeta": _ENV_META,
    "rlightning.types:EnvRet": _ENV_RET,
    "rlightning.types:EnvRet.compute_sent_latency": "now_ns=None",
    "rlightning.types:EnvRet.cpu": "",
    "rlightning.types:EnvRet.cuda": "device=None",
    "rlightning.types:EnvRet.fields": "",
    "rlightning.types:EnvRet.get_defaults": "",
    "rlightning.types:EnvRet.mark_env_sent": "",
    "rlightning.types:EnvRet.numpy": "",
    "rlightning.types:EnvRet.to_dict": "",
    "rlightning.types:MultiAgentEnvRet": _ENV_RET,
    "rlightning.types:MultiAgentPolicyResponse": "env_id, **data",
    "rlightning.types:MultiAgentPolicyResponse.make_example": "action_spaces, env_id=None, **data",
    "rlightning.types:PolicyResponse": "env_id, **data",
    "rlightning.types:PolicyResponse.compute_sent_latency": "now_ns=None",
    "rlightning.types:PolicyResponse.cpu": "",
    "rlightning.types:PolicyResponse.cuda": "device=None",
    "rlightning.types:PolicyResponse.make_example": "action_space, env_id=None, **data",
    "rlightning.types:PolicyResponse.mark_policy_sent": "",
    "rlightning.types:PolicyResponse.numpy": "",
    "rlightning.types:PolicyResponse.to_dict": "",
    "rlightning.buffer:DataBuffer": f"config, {_FUNCTIONS}",
    "rlightning.buffer:DataBuffer.add_batched_data_async": "batched_data, truncations=None",
    "rlightning.buffer:DataBuffer.add_batched_transition": "batched_env_ret, batched_policy_resp, "
    "truncations=None, is_eval=False",
    "rlightning.buffer:DataBuffer.add_data_async": "env_id, data, truncated=False",
    "rlightning.buffer:DataBuffer.add_episode": "episode, num_envs=1",
    "rlightning.buffer:DataBuffer.add_transition": "env_id, env_ret, policy_resp, "
    "truncated=False, is_eval=False",
    "rlightning.buffer:DataBuffer.clear": "",
    "rlightning.buffer:DataBuffer.get": "item",
    "rlightning.buffer:DataBuffer.get_all": "",
    "rlightning.buffer:DataBuffer.init": "env_meta_list=None, env_ids=None, train_worker_num=1",
    "rlightning.buffer:DataBuffer.init_storage_table": "env_ids=None, train_worker_num=1",
    "rlightning.buffer:DataBuffer.print_timing_summary": "reset=False",
    "rlightning.buffer:DataBuffer.sample": "batch_size=None, shuffle=True, drop_last=True",
    "rlightning.buffer:DataBuffer.size": "",
    "rlightning.buffer:DataBuffer.truncate_episodes": "items",
    "rlightning.buffer:DataBuffer.truncate_one_episode": "item",
    "rlightning.buffer.utils:Storage": "capacity, mode=circular, unit=transition, "
    f"env_meta_list=None, device=cpu, {_FUNCTIONS}, auto_truncate_episode=False",
    "rlightning.buffer.utils:EpisodeTable": "num_storages, env_ids=None, num_train_workers=None, "
    "component_distribution=None, node_affinity_env=False, node_affinity_train=False",
    "rlightning.env:BaseEnv": "config, worker_index=0, preprocess_fn=None",
    "rlightning.env:BaseEnv.apply_evaluate_cfg": "",
    "rlightning.env:BaseEnv.close": "",
    "rlightning.env:BaseEnv.collect_async": "",
    "rlightning.env:BaseEnv.finish_rollout": "",
    "rlightning.env:BaseEnv.get_action_space": "",
    "rlightning.env:BaseEnv.get_env_id": "",
    "rlightning.env:BaseEnv.get_env_stats": "reset=False",
    "rlightning.env:BaseEnv.get_max_episode_steps": "",
    "rlightning.env:BaseEnv.get_metadata": "",
    "rlightning.env:BaseEnv.get_observation_space": "",
    "rlightning.env:BaseEnv.init": "",
    "rlightning.env:BaseEnv.is_finish": "",
    "rlightning.env:BaseEnv.offload": "",
    "rlightning.env:BaseEnv.print_timing_summary": "reset=False",
    "rlightning.env:BaseEnv.reload": "",
    "rlightning.env:BaseEnv.reset": "*args, **kwargs",
    "rlightning.env:BaseEnv.restore_evaluate_cfg": "",
    "rlightning.env:BaseEnv.step": "policy_resp",
    "rlightning.env:BaseEnv.step_async": "policy_resp_list",
    "rlightning.env:EnvGroup": "env_cfg_list, preprocess_fn=default_env_preprocess_fn",
    "rlightning.env:EnvGroup.apply_evaluate_cfg": "",
    "rlightning.env:EnvGroup.auto_reset": "max_episode_steps=None",
    "rlightning.env:EnvGroup.build_env": "env_cfg, preprocess_fn=default_env_preprocess_fn, "
    "worker_index=None",
    "rlightning.env:EnvGroup.close": "",
    "rlightning.env:EnvGroup.collect_async": "timeout=None, wait_all=False",
    "rlightning.env:EnvGroup.get_action_spaces": "",
    "rlightning.env:EnvGroup.get_env_stats": "reset=False",
    "rlightning.env:EnvGroup.get_observation_spaces": "",
    "rlightning.env:EnvGroup.get_stats": "",
    "rlightning.env:EnvGroup.init": "",
    "rlightning.env:EnvGroup.offload": "",
    "rlightning.env:EnvGroup.print_timing_summary": "reset=False",
    "rlightning.env:EnvGroup.reload": "",
    "rlightning.env:EnvGroup.reset": "*args, **kwargs",
    "rlightning.env:EnvGroup.restore_evaluate_cfg": "",
    "rlightning.env:EnvGroup.size": "",
    "rlightning.env:EnvGroup.step": "batched_policy_resp",
    "rlightning.env:EnvGroup.step_async": "batched_policy_resp",
    "rlightning.env:EnvMeta": _ENV_META,
    "rlightning.utils.builders:build_data_buffer": "buffer_type, config, **functions",
    "rlightning.utils.builders:build_env_group": "env_cfg_list, "
    "preprocess_fn=default_env_preprocess_fn",
    "rlightning.utils.builders:build_policy_group": "policy_type, config, cluster=None",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_the_documentation_has_them(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("call", SIGNATURES)
def test_calls_take_what_the_documentation_says(call: str) -> None:
    module, _, names = call.partition(":")
    owner: Any = importlib.import_module(module)
    called = owner
    for name in names.split("."):
        owner, called = called, getattr(called, name)
    parameters = list(inspect.signature(called).parameters.values())
    if inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, name)):
        del parameters[0]  # self
    documented = [text for text in SIGNATURES[call].split(", ") if text]
    optional = parameters[len(documented) :]
    assert [_shown(parameter) for parameter in parameters[: len(documented)]] == documented
    assert all(parameter.default is not parameter.empty for parameter in optional)


def _shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    name = stars.get(parameter.kind, "") + parameter.name
    if parameter.kind is parameter.KEYWORD_ONLY:
        name = f"* {name}"
    if parameter.default is parameter.empty:
        return name
    return f"{name}={getattr(parameter.default, '__name__', parameter.default)}"


def test_methods_are_of_the_documented_kind() -> None:
    for owner, name in [
        ("BatchedData", "from_dict"),
        ("PolicyResponse", "make_example"),
        ("MultiAgentPolicyResponse", "make_example"),
    ]:
        found = getattr(importlib.import_module("rlightning.types"), owner)
        assert isinstance(inspect.getattr_static(found, name), staticmethod)
    for found, name in [(EnvRet, "fields"), (EnvRet, "get_defaults"), (EnvGroup, "build_env")]:
        assert isinstance(inspect.getattr_static(found, name), classmethod)
    assert BaseEnv.__abstractmethods__ == {"reset", "step"}
    assert not DataBuffer.__abstractmethods__


def test_classes_have_the_documented_bases() -> None:
    assert issubclass(MultiAgentEnvRet, EnvRet)
    assert issubclass(MultiAgentPolicyResponse, PolicyResponse)
    assert issubclass(PolicyResponse, SimpleNamespace)
    assert issubclass(BufferConfig, Config)
    assert issubclass(DataBuffer, ABC)
    assert issubclass(BaseEnv, ABC)


def test_objects_have_the_documented_attributes() -> None:
    group = EnvGroup([EnvConfig(name="e", backend="gymnasium", task="CartPole-v1")])
    (env,) = group.env_list
    attributes = {
        env: "config env_id env num_envs max_episode_steps timing_raw",
        group: "env_list env_servers env_ids id_to_env env_to_id step_counter throughput",
        EnvRet("e", 0): "env_id observation last_reward last_terminated last_truncated info "
        "last_info _extra ts_env_sent_ns",
        ReplayBuffer(
            BufferConfig(type="ReplayBuffer", capacity=1)
        ): "config storages table sampler",
    }
    try:
        for found, names in attributes.items():
            assert [name for name in names.split() if not hasattr(found, name)] == []
    finally:
        group.close()
