// An env client in JavaScript, over nothing but the .proto files: brings a cart-pole of its own into a running cluster.
//
//   npm install && node cartpole.js 127.0.0.1:50051 [--steps N] [--ca FILE --token-file FILE]
//
// What it has to do is told in docs/clients.md. Against a link that breaks it takes the session up again, and sends the
// step whose answer it still waits for once more.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");

// What ends a stream, but not the session.
const RETRIED = new Set([grpc.status.UNAVAILABLE, grpc.status.ALREADY_EXISTS, grpc.status.DEADLINE_EXCEEDED]);

// Tensors and spaces.

function tensor(dtype, shape, array) {
  return { dtype: `DTYPE_${dtype}`, shape, data: Buffer.from(array.buffer, array.byteOffset, array.byteLength) };
}

const float32 = (values, shape = [values.length]) => tensor("FLOAT32", shape, Float32Array.from(values));
const bool = (value) => tensor("BOOL", [1], Uint8Array.of(value ? 1 : 0));

const OBSERVATION_LIMIT = [4.8, Infinity, (12 * 2 * Math.PI) / 360 * 2, Infinity];

const SPEC = {
  num_envs: 1,
  observation_space: {
    box: {
      low: float32(OBSERVATION_LIMIT.map((limit) => -limit)),
      high: float32(OBSERVATION_LIMIT),
      shape: [4],
      dtype: "DTYPE_FLOAT32",
    },
  },
  action_space: { discrete: { n: 2, start: 0, dtype: "DTYPE_INT64" } },
};

// The env: the cart and pole of Barto, Sutton and Anderson (1983), with the figures of gymnasium's CartPole-v1.

class CartPole {
  reset() {
    this.state = Array.from({ length: 4 }, () => Math.random() * 0.1 - 0.05);
    this.length = 0;
    return this.state;
  }

  step(action) {
    let [x, xDot, theta, thetaDot] = this.state;
    const force = action === 1 ? 10 : -10;
    const temp = (force + 0.05 * thetaDot ** 2 * Math.sin(theta)) / 1.1;
    const thetaAcc =
      (9.8 * Math.sin(theta) - Math.cos(theta) * temp) / (0.5 * (4 / 3 - (0.1 * Math.cos(theta) ** 2) / 1.1));
    const xAcc = temp - (0.05 * thetaAcc * Math.cos(theta)) / 1.1;
    x += 0.02 * xDot;
    xDot += 0.02 * xAcc;
    theta += 0.02 * thetaDot;
    thetaDot += 0.02 * thetaAcc;
    this.state = [x, xDot, theta, thetaDot];
    this.length += 1;
    const terminated = Math.abs(x) > 2.4 || Math.abs(theta) > (12 * 2 * Math.PI) / 360;
    return { observation: this.state, reward: 1, terminated, truncated: !terminated && this.length >= 500 };
  }
}

// The session: hello and welcome, heartbeats, numbered steps, and taking up again after a cut.

class Session {
  constructor(address, { ca, token }) {
    const definition = protoLoader.loadSync("rlightning/v1/env_service.proto", {
      includeDirs: [PROTOS],
      keepCase: true,
      longs: Number,
      enums: String,
      oneofs: true,
    });
    const { EnvService } = grpc.loadPackageDefinition(definition).rlightning.v1;
    const credentials = ca ? grpc.credentials.createSsl(fs.readFileSync(ca)) : grpc.credentials.createInsecure();
    this.stub = new EnvService(address, credentials, { "grpc.keepalive_time_ms": 10_000 });
    this.metadata = new grpc.Metadata();
    if (token) this.metadata.set("authorization", `Bearer ${token}`);
    this.clientId = `${os.hostname().replace(/[^\w.-]/g, "-")}-${process.pid}-node`;
    this.seq = 0;
    this.token = "";
    this.reconnects = -1;
    this.waiting = null; // the step whose answer is due: { steps, resolve, reject }
    this.pauseMs = 100;
    this.connect();
  }

  connect() {
    this.reconnects += 1;
    this.epoch = 0;
    const stream = (this.stream = this.stub.Attach(this.metadata));
    stream.on("data", (message) => this.receive(message));
    stream.on("error", (error) => this.broke(stream, error));
    stream.write({
      hello: {
        last_seq: this.seq,
        session: {
          protocol_version: 1,
          library_version: "node",
          client_id: this.clientId,
          resume_token: this.token,
          spec: SPEC,
        },
      },
    });
  }

  receive({ welcome, answer }) {
    if (welcome) {
      this.token = welcome.resume_token;
      this.epoch = welcome.epoch;
      this.pauseMs = welcome.reconnect_initial_ms;
      this.maxPauseMs = welcome.reconnect_max_ms;
      this.beating = setInterval(
        () => this.stream.write({ heartbeat: { state: "CLIENT_STATE_RUNNING" } }),
        welcome.heartbeat_ms,
      );
      if (this.waiting) this.write(this.waiting.step);
    } else if (answer && this.waiting?.step.seq === answer.seq) {
      const { resolve, reject } = this.waiting;
      this.waiting = null;
      if (answer.error) reject(new Error(answer.error.message));
      else resolve(answer.response);
    }
  }

  broke(stream, error) {
    if (stream !== this.stream) return;
    clearInterval(this.beating);
    if (this.closing || !RETRIED.has(error.code)) {
      this.waiting?.reject(error);
      return;
    }
    setTimeout(() => this.connect(), this.pauseMs);
    this.pauseMs = Math.min(this.pauseMs * 2, this.maxPauseMs ?? 1000);
  }

  write(step) {
    this.stream.write({ steps: { epoch: this.epoch, steps: [step] } });
  }

  // Sends what the env returned and resolves to the policy's answer; to null once that is given up.
  ask(envRet) {
    const step = { seq: ++this.seq, env_ret: envRet, wants_action: true };
    return new Promise((resolve, reject) => {
      this.waiting = { step, resolve, reject };
      if (this.epoch) this.write(step); // else the welcome sends it
    });
  }

  // Waits for no answer any more: it may take long while nobody learns.
  giveUp() {
    this.waiting?.resolve(null);
    this.waiting = null;
  }

  // Sends what the env returned last; nothing answers it.
  tell(envRet) {
    if (this.epoch) this.write({ seq: ++this.seq, env_ret: envRet, wants_action: false });
  }

  // Leaves in order, so that the server closes the episode at once.
  async leave() {
    this.closing = true;
    clearInterval(this.beating);
    this.stream.write({ heartbeat: { state: "CLIENT_STATE_LEAVING" } });
    this.stream.end();
    await new Promise((resolve) => this.stream.on("end", resolve));
    this.stub.close();
  }
}

// One EnvRet; the observation of a row that has ended is that of its next episode.

function envRet(observation, { reward = 0, terminated = false, truncated = false, final = null } = {}) {
  const message = {
    env_id: "cartpole",
    observation: { tensor_value: float32(observation, [1, 4]) },
    last_reward: { tensor_value: float32([reward]) },
    last_terminated: { tensor_value: bool(terminated) },
    last_truncated: { tensor_value: bool(truncated) },
    ts_env_sent_ns: Date.now() * 1e6,
  };
  if (final) {
    message.final_rows = [0];
    message.final_observation = { tensor_value: float32(final, [1, 4]) };
  }
  return message;
}

function actionOf(response) {
  const { tensor_value: action } = response.data.map_value.entries.find(({ key }) => key === "action").value;
  return Number(action.data.readBigInt64LE());
}

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { steps: { type: "string" }, ca: { type: "string" }, "token-file": { type: "string" } },
  });
  if (positionals.length !== 1) throw new Error("usage: node cartpole.js HOST:PORT [--steps N]");
  const token = values["token-file"] && fs.readFileSync(values["token-file"], "utf8").trim();
  const steps = Number(values.steps ?? Infinity);
  const env = new CartPole();
  const session = new Session(positionals[0], { ca: values.ca, token });
  let stopped = false;
  process.once("SIGINT", () => {
    stopped = true; // another one ends the process at once
    session.giveUp();
  });

  let message = envRet(env.reset());
  let version = 0;
  let episodes = 0;
  for (let step = 0; step < steps && !stopped; step += 1) {
    const response = await session.ask(message);
    if (!response) {
      message = null;
      break;
    }
    version = response.policy_version ?? 0;
    const outcome = env.step(actionOf(response));
    if (outcome.terminated || outcome.truncated) {
      episodes += 1;
      message = envRet(env.reset(), { ...outcome, final: outcome.observation });
    } else {
      message = envRet(outcome.observation, outcome);
    }
  }
  if (message) session.tell(message); // the outcome of the last action
  await session.leave();
  console.log(`steps ${session.seq}  episodes ${episodes}  version ${version}  reconnects ${session.reconnects}`);
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exit(1);
});
