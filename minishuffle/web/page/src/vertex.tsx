// One vertex: its subtasks, their pools and channels, and its last ten minutes.
import { useMemo } from "preact/hooks";
import type { Buffers, Graph, History, Job, Task, TaskBuffers, VertexLoad } from "./api";
import { usePoll } from "./api";
import { Channels } from "./channels";
import { Chart } from "./chart";
import { ProfileOf } from "./flame";
import { bytes, count, millis, percent, rate } from "./format";
import { Empty, Facts, LevelBadge, Section, Share, State, Table } from "./parts";
import { Outputs } from "./tap";
import { VertexWatermark, Watermark } from "./watermark";

const POLL_MS = 2000;
const QUANTILES = ["p50", "p95", "p99", "max"] as const;

export function Vertex(props: { graph: Graph; job: Job; number: number; load: VertexLoad | undefined; history: History; runs: boolean }) {
  const { graph, job, number, load, history, runs } = props;
  const vertex = graph.vertices[number]!;
  const tasks = job.tasks.filter((task) => task.operator === number);
  const samples = history.vertices?.[number];
  const writes = graph.edges.some((edge) => edge.source === number) || vertex.is_source;
  const shares = useMemo(
    () => [
      { name: "back-pressured", values: samples?.backpressured ?? [], colour: "high" },
      { name: "busy", values: samples?.busy ?? [], colour: "busy", dash: [6, 3] },
    ],
    [samples],
  );
  const rates = useMemo(
    () => [
      ...(vertex.is_source ? [] : [{ name: "in", values: samples?.records_in ?? [], colour: "accent" }]),
      ...(writes ? [{ name: "out", values: samples?.records_out ?? [], colour: "second", dash: [6, 3] }] : []),
    ],
    [samples, vertex, writes],
  );
  return (
    <Section
      title={vertex.name}
      id="vertex"
      note={
        <>
          {load !== undefined && <LevelBadge of={load.level} />} {vertex.operators.length > 1 && vertex.operators.join(" → ")}
        </>
      }
    >
      <Facts facts={[["Watermark", <VertexWatermark tasks={tasks} at={job.at} />]]} />
      <div class="charts">
        <Chart title="Share of time, most of any subtask" at={history.at} lines={shares} show={percent} top={1.04} />
        <Chart title="Records per second, all subtasks" at={history.at} lines={rates} show={rate} />
      </div>
      <h3>Subtasks</h3>
      <Table label={`Subtasks of ${vertex.name}`} tall>
        <thead>
          <tr>
            <th class="number">Subtask</th>
            <th>State</th>
            <th class="number">Worker</th>
            <th class="number">Attempt</th>
            <th>Back-pressured</th>
            <th>Busy</th>
            <th class="number">In</th>
            <th class="number">Out</th>
            <th class="number">Records in</th>
            <th class="number">Records out</th>
            <th>Watermark</th>
          </tr>
        </thead>
        <tbody>
          {tasks.map((task) => {
            const now = load?.subtasks.find((each) => each.index === task.index);
            return (
              <tr key={task.index}>
                <th scope="row" class="number">
                  {task.index}
                </th>
                <td>
                  <State state={task.state} />
                </td>
                <td class="number">{task.worker || "–"}</td>
                <td class="number">{task.attempt || "–"}</td>
                <td>{now === undefined ? "–" : <Share value={now.backpressured} kind="pressure" />}</td>
                <td>{now === undefined ? "–" : <Share value={now.busy} kind="busy" />}</td>
                <td class="number">{now === undefined ? "–" : rate(now.records_in)}</td>
                <td class="number">{now === undefined ? "–" : rate(now.records_out)}</td>
                <td class="number">{count(task.counters.records_in)}</td>
                <td class="number">{count(task.counters.records_out)}</td>
                <td>
                  <Watermark task={task} at={job.at} />
                </td>
              </tr>
            );
          })}
        </tbody>
      </Table>
      <Latencies tasks={tasks} name={vertex.name} />
      {runs && <Snapshots tasks={tasks} name={vertex.name} />}
      {runs && <ProfileOf key={`profile ${number}`} job={job.job} tasks={tasks} busiest={load?.busiest ?? 0} />}
      {runs && <Outputs key={`outputs ${number}`} job={job.job} number={number} graph={graph} />}
      {runs && <BufferTable job={job.job} number={number} name={vertex.name} />}
      {runs && <Channels key={number} job={job.job} number={number} graph={graph} />}
    </Section>
  );
}

/** How long latency markers took from their sources, if the job has them. */
function Latencies({ tasks, name }: { tasks: Task[]; name: string }) {
  const marked = tasks.filter((task) => task.counters.latency.count !== undefined);
  if (marked.length === 0) return null;
  return (
    <>
      <h3>Latency from the sources</h3>
      <Table label={`Latency of ${name}`} tall>
        <thead>
          <tr>
            <th class="number">Subtask</th>
            <th class="number">Markers</th>
            {QUANTILES.map((each) => (
              <th class="number" key={each}>
                {each}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {marked.map((task) => (
            <tr key={task.index}>
              <th scope="row" class="number">
                {task.index}
              </th>
              <td class="number">{count(task.counters.latency.count ?? 0)}</td>
              {QUANTILES.map((each) => (
                <td class="number" key={each}>
                  {millis(task.counters.latency[each] ?? 0)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </Table>
    </>
  );
}

/** From what next attempts would go on, if the job has a guarantee, and what that takes. */
function Snapshots({ tasks, name }: { tasks: Task[]; name: string }) {
  const held = tasks.filter((task) => task.holder > 0 || task.counters.snapshot.taken !== undefined);
  if (held.length === 0) return null;
  return (
    <>
      <h3>Snapshots</h3>
      <Table label={`Snapshots of ${name}`} tall>
        <thead>
          <tr>
            <th class="number">Subtask</th>
            <th class="number">Held by worker</th>
            <th class="number">Age</th>
            <th class="number">Bytes</th>
            <th class="number">Taken in</th>
            <th class="number">Taken</th>
          </tr>
        </thead>
        <tbody>
          {held.map(({ index, holder, counters: { snapshot } }) => (
            <tr key={index}>
              <th scope="row" class="number">
                {index}
              </th>
              <td class={holder > 0 ? "number" : "number alert"}>{holder || "–"}</td>
              <td class="number">{snapshot.age === undefined ? "–" : millis(snapshot.age)}</td>
              <td class="number">{bytes(snapshot.bytes ?? 0)}</td>
              <td class="number">{millis(snapshot.seconds ?? 0)}</td>
              <td class="number">{count(snapshot.taken ?? 0)}</td>
            </tr>
          ))}
        </tbody>
      </Table>
    </>
  );
}

function BufferTable({ job, number, name }: { job: string; number: number; name: string }) {
  const { data } = usePoll<Buffers>(`jobs/${job}/buffers`, POLL_MS);
  const tasks = data?.tasks.filter((task) => task.operator === number) ?? [];
  return (
    <>
      <h3>Pools and channels</h3>
      {data !== null && data.silent.length > 0 && <Empty>worker {data.silent.join(", ")} did not answer</Empty>}
      {data === null ? (
        <Empty>asking the workers …</Empty>
      ) : tasks.length === 0 ? (
        <Empty>no task of this vertex is deployed</Empty>
      ) : (
        <Table label={`Pools and channels of ${name}`} tall>{rows(tasks)}</Table>
      )}
    </>
  );
}

const of = (used: number, capacity: number) => `${count(used)} / ${count(capacity)}`;

function rows(tasks: TaskBuffers[]) {
  return (
    <>
      <thead>
        <tr>
          <th class="number">Subtask</th>
          <th>Side</th>
          <th class="number">Channels</th>
          <th class="number">Starved</th>
          <th class="number">Queue</th>
          <th class="number">Exclusive</th>
          <th class="number">Floating</th>
          <th class="number">Credit out</th>
          <th class="number">Backlog</th>
          <th class="number">Output pool</th>
        </tr>
      </thead>
      <tbody>
        {tasks.flatMap((task) => [
          ...task.gates.map((gate, input) => (
            <tr key={`${task.index} in ${input}`}>
              <th scope="row" class="number">
                {task.index}
              </th>
              <td>
                input {input}
                {gate.debloated_bytes !== null && `, buffers of ${bytes(gate.debloated_bytes)}`}
                {gate.in_flight_seconds !== null && `, ${millis(gate.in_flight_seconds)} in flight`}
              </td>
              <td class="number">{count(gate.channels)}</td>
              <td class={gate.channels_starved > 0 ? "number alert" : "number"}>
                {gate.channels_starved > 0 && <span aria-hidden="true">▲ </span>}
                {count(gate.channels_starved)}
              </td>
              <td class="number">{count(gate.queue_buffers)}</td>
              <td class="number">{gate.credits_announced !== null ? of(gate.exclusive_used, gate.exclusive_capacity) : "–"}</td>
              <td class="number">{of(gate.floating_used, gate.floating_capacity)}</td>
              <td class="number">{gate.credits_announced !== null ? count(gate.credits_announced) : "TCP"}</td>
              <td class="number">–</td>
              <td class="number">–</td>
            </tr>
          )),
          ...task.partitions.map((partition, output) => (
            <tr key={`${task.index} out ${output}`}>
              <th scope="row" class="number">
                {task.index}
              </th>
              <td>output {output}</td>
              <td class="number">–</td>
              <td class="number">–</td>
              <td class="number">–</td>
              <td class="number">–</td>
              <td class="number">–</td>
              <td class="number">–</td>
              <td class="number">{count(partition.backlog_buffers)}</td>
              <td class="number">{of(partition.pool.used, partition.pool.capacity)}</td>
            </tr>
          )),
        ])}
      </tbody>
    </>
  );
}
