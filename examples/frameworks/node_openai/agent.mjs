// A SQL agent with the OpenAI client for Node. The task is read as JSON from stdin, the reply is written to stdout.
import fs from "node:fs";

import OpenAI from "openai";
import initSqlJs from "sql.js";

const task = JSON.parse(fs.readFileSync(0, "utf8"));
const SQL = await initSqlJs();
const db = new SQL.Database(fs.readFileSync(task.db_path));
const client = new OpenAI();

const run = (query) => {
  try {
    const [result] = db.exec(query);
    return result ? result.values.slice(0, 10).map((row) => row.join(" | ")).join("\n") : "no rows";
  } catch (error) {
    return `Error: ${error.message}`;
  }
};

const tools = [
  {
    type: "function",
    function: {
      name: "run_query",
      description: "Run a SQLite query and see its first rows.",
      parameters: { type: "object", properties: { query: { type: "string" } }, required: ["query"] },
    },
  },
];
const messages = [
  {
    role: "system",
    content:
      "You are a SQL expert. Try queries with run_query. When you are sure, reply with the final query in a ```sql block.\n\n" +
      run("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL"),
  },
  { role: "user", content: task.question },
];
let message;
for (let turn = 0; turn < 5; turn++) {
  const response = await client.chat.completions.create({ model: "gpt-5-mini", messages, tools });
  message = response.choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    let result;
    try {
      result = run(JSON.parse(call.function.arguments).query);
    } catch (error) {
      result = `Error: ${error.message}`;
    }
    messages.push({ role: "tool", tool_call_id: call.id, content: result });
  }
}
console.log(message.content ?? "");
