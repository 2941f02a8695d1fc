// Each channel of a vertex: read only while the list is open, since every worker writes it anew.
import { useState } from "preact/hooks";
import type { Dump, DumpedInput, DumpedOutput, Graph } from "./api";
import { usePoll } from "./api";
import { count } from "./format";
import { Empty, Table } from "./parts";

const POLL_MS = 2000;
const ROWS_SHOWN = 200;

export function Channels({ job, number, graph }: { job: string; number: number; graph: Graph }) {
  const [open, set] = useState(false);
  return (
    <details open={open} onToggle={(event) => set(event.currentTarget.open)}>
      <summary>Each channel</summary>
      {open && <List job={job} number={number} graph={graph} />}
    </details>
  );
}

function List({ job, number, graph }: { job: string; number: number; graph: Graph }) {
  const { data } = usePoll<Dump>(`jobs/${job}/dump`, POLL_MS);
  if (data === null) return <Empty>asking the workers …</Empty>;
  const name = (operator: number) => graph.vertices[operator]?.name ?? "external";
  const tasks = data.workers.flatMap((worker) => worker.tasks).filter((task) => task.operator === number);
  tasks.sort((a, b) => a.index - b.index);
  const rows = tasks.flatMap((task) => [
    ...task.gates.flatMap((gate) =>
      gate.channels.map((channel) => input(task.index, `${name(gate.from_operator)}[${channel.producer}]`, channel)),
    ),
    ...task.partitions.flatMap((partition) =>
      partition.channels.map((channel) => output(task.index, `${name(partition.to_operator)}[${channel.consumer}]`, channel)),
    ),
  ]);
  const leftOut =
    Math.max(0, rows.length - ROWS_SHOWN) +
    tasks.flatMap((task) => [...task.gates, ...task.partitions]).reduce((sum, each) => sum + each.channels_left_out, 0);
  const tcp = tasks.some((task) => task.gates.some((gate) => gate.channels.some((channel) => channel.tcp !== undefined)));
  return (
    <>
      {data.silent.length > 0 && <Empty>worker {data.silent.join(", ")} did not answer</Empty>}
      {tcp && <Empty>TCP flow control: a starved channel stops all others of its connection. Channels inside a worker, blocking partitions and external clients have credit.</Empty>}
      <Table label={`Channels of ${name(number)}`} tall>
        <thead>
          <tr>
            <th class="number">Subtask</th>
            <th>Channel</th>
            <th>State</th>
            <th class="number">Queue</th>
            <th class="number">Backlog</th>
            <th class="number">Credit</th>
            <th class="number">Exclusive free</th>
            <th class="number">Floating free</th>
          </tr>
        </thead>
        <tbody>{rows.slice(0, ROWS_SHOWN)}</tbody>
      </Table>
      {leftOut > 0 && (
        <Empty>
          … and {count(leftOut)} more: <code>minishuffle dump {job}</code> has the busiest
        </Empty>
      )}
    </>
  );
}

function input(index: number, other: string, channel: DumpedInput) {
  const credit = channel.credit;
  const starved = credit?.starved ?? channel.tcp?.waits_for_buffer;
  return (
    <tr key={`${index} from ${other}`}>
      <th scope="row" class="number">
        {index}
      </th>
      <td>from {other}</td>
      <td class={starved ? "alert" : ""}>
        {starved ? (
          <>
            <span aria-hidden="true">▲ </span>starved
          </>
        ) : (
          channel.waits_for || (channel.local !== undefined ? "inside the worker" : channel.phase)
        )}
      </td>
      <td class="number">{count(channel.queue)}</td>
      <td class="number">–</td>
      <td class="number">{credit !== undefined ? count(credit.announced) : channel.local !== undefined ? count(channel.local.credit) : channel.tcp !== undefined ? "TCP" : "–"}</td>
      <td class="number">{credit !== undefined ? `${credit.exclusive_free} / ${credit.exclusive}` : "–"}</td>
      <td class="number">{credit !== undefined ? count(credit.floating_free) : "–"}</td>
    </tr>
  );
}

function output(index: number, other: string, channel: DumpedOutput) {
  const state = channel.closed
    ? "closed"
    : channel.suspected
      ? "▲ suspected"
      : !channel.available
        ? "▲ unavailable"
        : `read by ${channel.reader}`;
  return (
    <tr key={`${index} to ${other}`}>
      <th scope="row" class="number">
        {index}
      </th>
      <td>to {other}</td>
      <td class={state.startsWith("▲") ? "alert" : ""}>{state}</td>
      <td class="number">{count(channel.queue)}</td>
      <td class="number">{count(channel.backlog)}</td>
      <td class="number">{channel.credit !== undefined ? count(channel.credit) : "–"}</td>
      <td class="number">–</td>
      <td class="number">–</td>
    </tr>
  );
}
