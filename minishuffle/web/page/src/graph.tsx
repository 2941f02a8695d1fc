// The job graph: vertices in layers from left to right, edges between them, and what flows.
import { Graph as Layout, layout } from "@dagrejs/dagre";
import { useMemo } from "preact/hooks";
import type { Graph, Job, VertexLoad } from "./api";
import { percent, rate } from "./format";
import { LevelBadge, Share } from "./parts";

const WIDTH = 244;
const HEIGHT = 118;

interface Placed {
  width: number;
  height: number;
  nodes: { x: number; y: number }[];
  edges: { d: string; x: number; y: number }[];
}

function placed(graph: Graph, down: boolean): Placed {
  const drawing = new Layout({ multigraph: true });
  drawing.setGraph({ rankdir: down ? "TB" : "LR", ranksep: down ? 44 : 84, nodesep: 24, marginx: 8, marginy: 8 });
  drawing.setDefaultEdgeLabel(() => ({}));
  graph.vertices.forEach((_, number) => drawing.setNode(String(number), { width: WIDTH, height: HEIGHT }));
  graph.edges.forEach((edge, number) => drawing.setEdge(String(edge.source), String(edge.target), {}, String(number)));
  layout(drawing);
  const size = drawing.graph() as { width?: number; height?: number };
  return {
    width: Math.ceil(size.width ?? WIDTH),
    height: Math.ceil(size.height ?? HEIGHT),
    nodes: graph.vertices.map((_, number) => drawing.node(String(number)) as { x: number; y: number }),
    edges: graph.edges.map((edge, number) => {
      const found = drawing.edge(String(edge.source), String(edge.target), String(number)) as {
        points: { x: number; y: number }[];
      };
      const middle = found.points[Math.floor(found.points.length / 2)]!;
      return { d: smooth(found.points), x: middle.x, y: middle.y };
    }),
  };
}

/** A curve through the middles between the points. */
function smooth(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  let d = `M${first!.x} ${first!.y}`;
  rest.forEach((point, number) => {
    const next = rest[number + 1];
    if (next === undefined) d += `L${point.x} ${point.y}`;
    else d += `Q${point.x} ${point.y} ${(point.x + next.x) / 2} ${(point.y + next.y) / 2}`;
  });
  return d;
}

export function JobGraph(props: {
  graph: Graph;
  job: Job;
  loads: VertexLoad[];
  chosen: number;
  choose: (vertex: number) => void;
  narrow: boolean;
}) {
  const { graph, job, loads, chosen, choose, narrow } = props;
  const place = useMemo(() => placed(graph, narrow), [graph, narrow]);
  const states = useMemo(() => countStates(job, graph.vertices.length), [job, graph]);
  return (
    <div class="scroll graph" role="region" aria-label="Job graph" tabIndex={0}>
      <div class="drawing" style={{ width: `${place.width}px`, height: `${place.height}px` }}>
        <svg width={place.width} height={place.height} aria-hidden="true">
          <defs>
            <marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
              <path d="M0 0L8 4L0 8z" />
            </marker>
          </defs>
          {place.edges.map((edge, number) => (
            <path key={number} class="edge" d={edge.d} marker-end="url(#arrow)" />
          ))}
        </svg>
        {graph.edges.map((edge, number) => (
          <span
            key={number}
            class="partitioner"
            style={{ left: `${place.edges[number]!.x}px`, top: `${place.edges[number]!.y}px` }}
          >
            {edge.kind === "pipelined_bounded" ? edge.partitioner : `${edge.partitioner}, ${edge.kind}`}
          </span>
        ))}
        {graph.vertices.map((vertex, number) => {
          const load = loads[number];
          const corner = place.nodes[number]!;
          const kind = load === undefined ? "" : load.level.toLowerCase();
          const notRunning = states[number]!.filter(([state]) => state !== "running");
          return (
            <button
              key={number}
              type="button"
              class={`vertex ${kind}`}
              aria-pressed={number === chosen}
              onClick={() => choose(number)}
              style={{
                left: `${corner.x - WIDTH / 2}px`,
                top: `${corner.y - HEIGHT / 2}px`,
                width: `${WIDTH}px`,
                height: `${HEIGHT}px`,
              }}
            >
              <span class="top">
                <strong title={vertex.name}>{vertex.name}</strong>
                <span class="times" title="subtasks">
                  ×{vertex.parallelism}
                </span>
              </span>
              {load === undefined ? (
                <span class="quiet">
                  {notRunning.map(([state, number]) => `${number} ${state}`).join(", ") || "no samples yet"}
                </span>
              ) : (
                <>
                  <span class="line">
                    <LevelBadge of={load.level} />
                    <span class="quiet" title={`subtask ${load.most_backpressured}`}>
                      back-pressured {percent(load.backpressured)}
                    </span>
                  </span>
                  <span class="line">
                    <span class="quiet">busy</span>
                    <Share value={load.busy} kind="busy" />
                  </span>
                  <span class="line rates">
                    {vertex.is_source ? (
                      <span>source</span>
                    ) : (
                      <span>in {rate(load.records_in)}</span>
                    )}
                    {notRunning.length > 0 ? (
                      <span class="state warn">
                        <span aria-hidden="true">▲</span> {notRunning[0]![1]} {notRunning[0]![0]}
                      </span>
                    ) : (
                      <span>{load.records_out > 0 ? `out ${rate(load.records_out)}` : ""}</span>
                    )}
                  </span>
                </>
              )}
            </button>
          );
        })}
      </div>
    </div>
  );
}

function countStates(job: Job, vertices: number): [string, number][][] {
  const found = Array.from({ length: vertices }, () => new Map<string, number>());
  for (const task of job.tasks) {
    const states = found[task.operator];
    states?.set(task.state, (states.get(task.state) ?? 0) + 1);
  }
  return found.map((each) => [...each.entries()]);
}
