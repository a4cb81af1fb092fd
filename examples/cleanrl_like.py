"""PPO in one file, after CleanRL, on a cluster: `python examples/cleanrl_like.py [CONFIG]`."""

import sys
from collections import deque
from statistics import mean

import torch

from rlightning.cluster import LocalCluster
from rlightning.learner.ppo import estimate_advantages
from rlightning.policy import build_policy, policy_weights
from rlightning.policy.weights import dump_weights

with LocalCluster(*sys.argv[1:] or ["configs/cartpole.yaml"]) as cluster:
    torch.set_num_threads(cluster.config.learner.torch_threads)
    policy = build_policy(cluster.config.policy, "train")
    policy.init_train(env_meta=cluster.env.metas()[0])
    params = [*policy.actor.parameters(), *policy.critic.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3, eps=1e-5)
    returns = deque(maxlen=cluster.config.train.target_episodes)
    while len(returns) < returns.maxlen or mean(returns) < cluster.config.train.target_return:
        b = {k: torch.tensor(v) for k, v in cluster.buffer.next_batch().columns.items()}
        ended = {"terminated": b["terminated"], "stop": b["terminated"] | b["truncated"] | b["cut"]}
        with torch.no_grad():
            value, after = (policy.critic(b[f"{k}observation"])[..., 0] for k in ("", "next_"))
        given = {"reward": b["reward"], "own": b["action_source"] == 1, **ended}
        adv, target = estimate_advantages(0.99, 0.95, value=value, next_value=after, **given)
        flat = {k: v.flatten(0, 1) for k, v in {**b, "adv": adv, "target": target}.items()}
        for i in torch.cat([torch.randperm(adv.numel()) for _ in range(4)]).split(256):
            obs, action, a = (flat[k][i] for k in ("observation", "action", "adv"))
            log_prob = policy.distribution(policy.actor(obs)).log_prob(action)
            ratio = (log_prob - flat["log_prob"][i]).exp()
            a = (a - a.mean()) / (a.std() + 1e-8)
            policy_loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
            value_loss = 0.5 * (policy.critic(obs).squeeze(-1) - flat["target"][i]).square().mean()
            optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        version = cluster.policy.version + 1
        cluster.policy.publish(version, dump_weights(policy_weights(policy)))
        returns.extend(episode.episode_return for episode in cluster.env.episodes())
        print(f"version {version}  return {mean(returns):.1f}", flush=True)
