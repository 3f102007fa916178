"""The longer verbs, one module each; ``cli`` declares their options."""
