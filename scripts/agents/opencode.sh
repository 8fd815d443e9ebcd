# Its title is a request of its own: without the agent that writes it there is none.
mkdir -p ~/.config/opencode
cat > ~/.config/opencode/opencode.json <<EOF
{
  "provider": {"run": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
    "models": {"$OPENAI_MODEL": {}}
  }},
  "model": "run/$OPENAI_MODEL",
  "agent": {"title": {"disable": true}}
}
EOF
opencode run "$1"
cat answer.txt
