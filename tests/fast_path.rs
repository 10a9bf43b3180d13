//! The owner's allocations and frees, as they are in a program: no lock, no atomic read-modify-write, few instructions.
//!
//! Builds the example `fast_path` as a release is built (link-time optimisation over all crates, which inlines the path), and
//! looks at its machine code with objdump and counts its instructions with valgrind. Times are for benches; these do not
//! depend on the machine.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A target directory of its own: the outer cargo may hold the lock of the usual one.
const TARGET: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/fast_path");

/// Runs a command, which has to succeed.
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Whether a tool is there; says so if the test is skipped for it.
fn has(tool: &str) -> bool {
    let there = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: the figures are for x86-64");
    } else if !there {
        println!("skipped: no {tool}");
    }
    there && cfg!(target_arch = "x86_64")
}

/// The example, built once.
fn example() -> &'static Path {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--release", "--package", env!("CARGO_PKG_NAME"), "--example", "fast_path"]);
        run(cargo.args(["--target-dir", TARGET]).current_dir(env!("CARGO_MANIFEST_DIR")));
    });
    Path::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/fast_path/release/examples/fast_path"))
}

/// The text that objdump prints.
fn objdump(arguments: &[&str]) -> String {
    String::from_utf8(run(Command::new("objdump").args(arguments).arg(example())).stdout).expect("objdump prints ASCII")
}

/// The machine code of the example.
struct Code {
    /// Each symbol, with its address and length.
    symbols: Vec<(String, u64, u64)>,
    /// Each instruction, with its address.
    instructions: Vec<(u64, String)>,
}

impl Code {
    fn read() -> Code {
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        // `0000000000016dd0 g     F .text	0000000000000042              alloc_16`
        let symbol = |line: &str| {
            let (before, after) = line.split_once(" .text\t")?;
            let mut after = after.split_whitespace();
            let (len, name) = (hex(after.next()?)?, after.next_back()?);
            Some((name.to_owned(), hex(before.split_whitespace().next()?)?, len))
        };
        // `   16dd0:	mov    %fs:0xffffffffffffffe0,%rax`
        let instruction = |line: &str| {
            let (address, text) = line.trim_start().split_once(":\t")?;
            Some((hex(address)?, text.to_owned()))
        };
        Code {
            symbols: objdump(&["-t"]).lines().filter_map(symbol).collect(),
            instructions: objdump(&["-d", "--no-show-raw-insn"]).lines().filter_map(instruction).collect(),
        }
    }

    /// The instructions of the functions whose symbols are chosen.
    fn of(&self, choose: impl Fn(&str) -> bool) -> Vec<&str> {
        let chosen: Vec<_> = self.symbols.iter().filter(|(symbol, _, _)| choose(symbol)).collect();
        let within = |at: u64| chosen.iter().any(|(_, address, len)| (*address..address + len).contains(&at));
        self.instructions.iter().filter(|(at, _)| within(*at)).map(|(_, text)| &text[..]).collect()
    }
}

/// Whether an instruction is an atomic read-modify-write, or a fence. (An `xchg` with memory locks without saying so.)
fn is_locked(instruction: &&str) -> bool {
    instruction.starts_with("lock")
        || instruction.starts_with("xchg") && instruction.contains('(')
        || instruction.contains("fence")
}

#[test]
fn owners_path_has_no_locked_instruction() {
    if !has("objdump") {
        return;
    }
    let code = Code::read();
    // The example's functions, whole: what they inline ends in jumps to the slow ways, which may lock.
    const OWN: [&str; 21] = [
        "alloc_16",
        "dealloc_16",
        "pair_16",
        "alloc_256",
        "dealloc_256",
        "pair_256",
        "alloc_4096",
        "dealloc_4096",
        "pair_4096",
        "alloc_65536",
        "dealloc_65536",
        "pair_65536",
        "pair_4m",
        "alloc_any",
        "dealloc_any",
        "realloc_in_place",
        "key",
        "take_buffer",
        "drop_buffer",
        "buffer_65536",
        "buffer_1m",
    ];
    for name in OWN {
        let instructions = code.of(|symbol| symbol == name);
        assert!(!instructions.is_empty(), "no function {name}");
        assert_eq!(instructions.iter().find(|instruction| is_locked(instruction)), None, "{name}");
    }
    // The functions of large blocks, and what the compiler chose not to inline where it does not know the size.
    for name in ["allocate_large", "free_large", "___rust_alloc", "___rust_dealloc", "___rust_realloc", "GlobalAlloc"] {
        let instructions = code.of(|symbol| symbol.contains(name));
        assert!(!instructions.is_empty() || !name.contains("large"), "no function {name}");
        assert_eq!(instructions.iter().find(|instruction| is_locked(instruction)), None, "{name}");
    }
    // What frees a block of another thread does lock: so it would be seen.
    assert!(code.of(|symbol| symbol.contains("free_elsewhere")).iter().any(is_locked));
}

/// Instructions of the example doing something so often.
fn instructions(operation: &str, count: u64) -> u64 {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    let output = run(valgrind.arg(example()).args([operation, &count.to_string()]));
    let text = String::from_utf8_lossy(&output.stderr);
    let collected = text.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    collected.unwrap_or_else(|| panic!("callgrind printed no count: {text}"))
}

#[test]
fn owners_path_stays_short() {
    if !has("valgrind") {
        return;
    }
    // Each with what a pair, or a look-up, takes with everything around it; about a tenth more is let pass, since compilers
    // differ. Of a `pair_16`, 8 are the allocation, 12 the free, 4 the loop.
    let reached = [
        ("pair_16", 30),
        ("pair_256", 30),
        ("pair_4096", 30),
        ("pair_65536", 34),
        ("pair_4m", 60),
        ("pair_any", 51),
        ("batch_16", 39),
        ("batch_256", 46),
        ("batch_4096", 70),
        ("realloc", 56),
        ("key", 27),
        // Taken, looked up, given back.
        ("buffer_65536", 82),
        ("buffer_65536_remote", 109),
        ("buffer_1m", 160),
        ("buffer_any", 115),
    ];
    let mut long = Vec::new();
    for (operation, expected) in reached {
        const MORE: u64 = 20_000;
        // The difference of two runs, so that the program's begin and end do not count.
        let each = (instructions(operation, 10_000 + MORE) - instructions(operation, 10_000)) as f64 / MORE as f64;
        println!("{operation}: {each:.1} instructions, {expected} expected");
        if each > f64::from(expected) * 1.1 + 0.5 {
            long.push(operation);
        }
    }
    assert!(long.is_empty(), "{long:?} take more instructions than they did");
}
