mkdir -p ~/.codex
cat > ~/.codex/config.toml <<EOF
model = "$OPENAI_MODEL"
model_provider = "run"
web_search = "disabled"

[model_providers.run]
name = "run"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[features]
multi_agent = false
EOF
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$1"
cat answer.txt
