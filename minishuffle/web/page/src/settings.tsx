// The settings of a job: those that were given first.
import type { Graph } from "./api";
import { Section, Table } from "./parts";

const CHOSEN = "automatic";

export function Settings({ graph }: { graph: Graph }) {
  const given = graph.settings.filter((each) => each.given);
  const others = graph.settings.filter((each) => !each.given);
  return (
    <Section title="Settings" id="settings" note={given.length === 0 ? "All are the defaults." : `${given.length} of ${graph.settings.length} are not the default.`}>
      {given.length > 0 && <List label="Settings that are not the default" settings={given} />}
      <details>
        <summary>{given.length > 0 ? "The others, which are the defaults" : "All settings"}</summary>
        <List label="Settings that are the default" settings={others} />
      </details>
    </Section>
  );
}

function List({ label, settings }: { label: string; settings: Graph["settings"] }) {
  return (
    <Table label={label}>
      <thead>
        <tr>
          <th>Setting</th>
          <th class="wide">Value</th>
          <th>Default</th>
        </tr>
      </thead>
      <tbody>
        {settings.map((each) => (
          <tr key={each.name}>
            <th scope="row">{each.name}</th>
            <td class="wide">{each.value || CHOSEN}</td>
            <td class="quiet">{each.default || CHOSEN}</td>
          </tr>
        ))}
      </tbody>
    </Table>
  );
}
